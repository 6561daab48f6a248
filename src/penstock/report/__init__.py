"""SHOW: the timeline and its text, Chrome-trace and HTML forms."""
