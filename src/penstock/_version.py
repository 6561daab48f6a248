"""The version of Penstock: stored in the wheel and in checkpoints, and equal in all processes of a pipeline."""

__version__ = "0.1.0.dev0"
