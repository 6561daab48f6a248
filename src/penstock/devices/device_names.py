"""Device names: check the devices that a user names, and say which have CUDA graphs."""

from __future__ import annotations

import torch

from penstock.errors import UsageError


def check_device(given: torch.device | str | int, argument: str = "device") -> torch.device:
    """Return the device; a GPU gets its index. `argument` is the name of the argument in error messages.

    Raises:
        UsageError: if the device does not exist or cannot run anything.
    """
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UsageError(f"{argument}: {given!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UsageError(f"{argument}: the meta device cannot run anything")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def has_graphs(device: torch.device) -> bool:
    """Return whether work on a device can be captured as a graph."""
    return device.type == "cuda"
