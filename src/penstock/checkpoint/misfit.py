"""Misfit: the error for a good checkpoint that belongs to something else; older checkpoints are then not tried."""

from penstock.errors import CheckpointError


class MisfitError(CheckpointError):
    """A checkpoint of another model, of other parameter groups, or of other schedulers."""
