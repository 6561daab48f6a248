"""Explain: what was decided for a model and why, as data, text and a page."""
