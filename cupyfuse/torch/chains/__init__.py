"""Chains of operations on tensors: what they are, and what runs them, forward and backward."""
