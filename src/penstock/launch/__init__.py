"""Launching: run a training from a configuration file and flags, in threads or in processes."""
