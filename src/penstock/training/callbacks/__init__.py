"""Callbacks: what is told of a training while it runs, and writes it down."""
