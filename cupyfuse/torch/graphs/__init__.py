"""From a captured graph to one in which chains run: import, partition, lowering."""
