"""Schedule builders: one file per family of schedules that needs no costs."""
