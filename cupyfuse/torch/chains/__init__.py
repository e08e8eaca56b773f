"""Chains of operations on tensors, and what runs them, forward and backward."""
