"""Planned: makes a captured model with its plan from the arguments of a pipeline."""
