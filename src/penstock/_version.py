"""The version: of the wheel, of checkpoints, and what processes of one pipeline must have in common."""

__version__ = "0.1.0.dev0"
