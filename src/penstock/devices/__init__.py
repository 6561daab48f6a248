"""Devices: the names of devices, and their streams, events and CUDA graphs."""
