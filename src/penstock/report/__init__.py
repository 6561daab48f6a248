"""Reports: the timeline of a step, and its text, Chrome-trace and HTML forms."""
