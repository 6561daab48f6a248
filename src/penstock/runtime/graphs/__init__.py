"""Graphs: a lane's actions as CUDA graphs."""
