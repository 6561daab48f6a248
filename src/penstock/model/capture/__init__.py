"""Capture: turn any model and an example into a Graph that can be cut into stages."""
