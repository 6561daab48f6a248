"""What each lane's device holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

__all__ = ["lane_bytes"]


def lane_bytes(pipe: Pipeline) -> tuple[int, ...]:
    """Return the most bytes that the devices of the lanes here have held; nothing on CPUs, where lanes share memory."""
    devices = [pipe.devices[lane] for lane in pipe.lanes]
    if any(device.type != "cuda" for device in devices):
        return ()
    return tuple(torch.cuda.max_memory_allocated(device) for device in devices)
