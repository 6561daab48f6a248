"""Verification: prove that a schedule can run, or list what is wrong with it."""
