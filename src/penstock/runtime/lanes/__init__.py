"""Lanes: threads or processes that run a pipeline, and who hangs when one does."""
