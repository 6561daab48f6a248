"""Lanes: the threads or processes that run a pipeline, and the reports about lanes that hang."""
