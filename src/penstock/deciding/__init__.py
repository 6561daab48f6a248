"""Deciding: from a model and what is asked for to a plan: defaults, profile, cuts, schedule."""
