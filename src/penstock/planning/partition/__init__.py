"""Partition: where to cut a model into stages."""
