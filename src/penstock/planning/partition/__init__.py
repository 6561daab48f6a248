"""Partitioning: choose the cuts that divide a model into stages."""
