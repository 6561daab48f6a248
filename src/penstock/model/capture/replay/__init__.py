"""Replay: the capture path that runs the model's own forward in every stage."""
