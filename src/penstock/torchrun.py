"""What torchrun says of this process."""

from __future__ import annotations

import os

__all__ = ["attempt"]


def attempt() -> int:
    """Return how often torchrun has started the processes again; 0 for those that are the first."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
