"""Deciding: make a plan from a model and a request: defaults, profile, cuts and schedule."""
