"""Splitting: cut batches that do not stack samples."""
