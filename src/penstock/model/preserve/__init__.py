"""Preserve: leave a model unchanged after a capture or a check."""
