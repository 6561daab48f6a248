"""Processes: start, watch and restart the processes of a training."""
