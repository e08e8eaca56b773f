"""Turn a captured graph into one in which chains run: import, partition, lowering."""
