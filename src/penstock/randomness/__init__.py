"""Randomness: who draws which random numbers, and the states of generators."""
