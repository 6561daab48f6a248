"""Schedule search: make schedules for costs and a memory limit, and prove how good they are."""
