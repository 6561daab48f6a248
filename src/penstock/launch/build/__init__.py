"""Trainer construction: make a trainer that is ready to run from a configuration."""
