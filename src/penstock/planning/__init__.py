"""CHOOSE: simulate a schedule, and make one from costs and a memory limit."""
