"""Profiling: measure or count the seconds and bytes of each node of a captured model."""
