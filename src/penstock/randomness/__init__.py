"""Randomness: random numbers that depend on a seed and on the part of the model that draws them."""
