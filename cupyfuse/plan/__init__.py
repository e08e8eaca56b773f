"""Plans: the steps that a graph runs in, how they are chosen, and how they read."""
