"""Model: the user's model as a graph, its stages, and their costs in time and memory."""
