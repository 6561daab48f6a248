"""Wire: everything that carries data between lanes."""
