"""Compile: stages compiled by Inductor, and the changes that Penstock makes to their graphs."""
