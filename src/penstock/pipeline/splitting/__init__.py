"""Splitting: batches that are no plain stacks."""
