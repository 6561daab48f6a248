"""Verification: prove that a schedule can run, or list its faults."""
