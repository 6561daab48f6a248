"""Faults: making them happen on purpose, and saying where one that happened came from."""
