"""Planned: from the arguments of a pipeline to a captured model with its plan."""
