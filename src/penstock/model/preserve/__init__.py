"""Preserve: leave no trace in the model that is looked at."""
