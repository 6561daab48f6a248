"""Builders: one file per family of schedules that is made for costs."""
