"""Explanations of a plan: its decisions and their reasons, as data, text and a page."""
