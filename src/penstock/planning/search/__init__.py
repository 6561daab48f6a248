"""Search: make a schedule from costs and a memory limit, and prove how good it is."""
