"""Profiling: measure or count what each node of a captured model takes."""
