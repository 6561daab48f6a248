"""Wire: how values and messages travel between lanes."""
