"""Devices: streams, events, CUDA graphs and the names of devices."""
