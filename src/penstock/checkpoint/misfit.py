"""Misfit: a checkpoint that is good, and of something else; an older one would be too, so none is tried."""

from penstock.errors import CheckpointError

__all__ = ["MisfitError"]


class MisfitError(CheckpointError):
    """A checkpoint of another model, of other groups of parameters, or of other schedulers."""
