"""One process: hides torchrun from accelerate, which takes several processes for data parallelism."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TORCHRUN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def without_torchrun() -> Iterator[None]:
    """Hide the environment variables of torchrun in a block."""
    hidden = {name: os.environ.pop(name) for name in _TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def as_one_process(args: Any, *, is_first: bool, device: torch.device | None = None) -> Iterator[None]:
    """Set up the arguments of a Trainer as those of a single process; only the first process of the pipeline writes.

    Lanes are parts of one model, so all processes need the same batches. With several processes, accelerate would give
    each its own share, and average the gradients.

    Args:
        args: the arguments of the Trainer.
        is_first: whether this process writes.
        device: the device on which the Trainer adds up losses; by default the one that it chooses.
    """
    logger = logging.getLogger("transformers.training_args")
    before = logger.level
    with without_torchrun():
        logger.setLevel(logging.ERROR)  # it advises to start data parallelism
        try:
            args.__dict__.pop("_setup_devices", None)  # if the arguments were read earlier, with torchrun
            args.device  # noqa: B018 - sets up the devices, and a state of accelerate for one process
        finally:
            logger.setLevel(before)
        args._n_gpu = min(1, args._n_gpu)  # otherwise the Trainer copies the model to all GPUs
        if device is not None:
            args.__dict__["_setup_devices"] = device
            if device.type != "cpu":  # the Trainer has made the first one current, in all processes
                torch.accelerator.set_device_index(device.index or 0)
        if not is_first:  # the process index stays 0, because workers of loaders take their seeds from it
            args.distributed_state.local_process_index = 1
            args.save_on_each_node = args.log_on_each_node = True  # they read the local index
        yield
