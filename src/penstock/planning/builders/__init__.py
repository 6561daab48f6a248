"""Cost-based builders: one file per family of schedules that is made for given costs."""
