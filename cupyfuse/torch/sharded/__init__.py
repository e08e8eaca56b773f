"""Chains on DTensors: each process runs its shards, and what is exchanged are the states of reductions."""
