"""Graphs: the actions of a lane as CUDA graphs."""
