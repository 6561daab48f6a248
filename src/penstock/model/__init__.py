"""WHAT: what a stage costs in time and memory."""
