"""Compile: stages compiled by Inductor, and what Penstock changes in their graphs."""
