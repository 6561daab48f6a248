"""Devices: what a user names as one, and whether there are CUDA graphs on it."""

from __future__ import annotations

import torch

from penstock.errors import UsageError

__all__ = ["check_device", "has_graphs"]


def check_device(given: torch.device | str | int, argument: str = "device") -> torch.device:
    """Return a device, of a GPU with its index; `argument` is what the user calls it.

    Raises:
        UsageError: when it does not exist, or nothing runs on it.
    """
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UsageError(f"{argument}: {given!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UsageError(f"{argument}: nothing runs on meta")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def has_graphs(device: torch.device) -> bool:
    """Return whether work on a device can be captured."""
    return device.type == "cuda"
