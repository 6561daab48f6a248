"""Tensor destinations: for each tensor of a loader's item, the GPU of the lane that uses it first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.model.example import arguments_of
from penstock.model.structure import flatten
from penstock.pipeline.pipeline import Pipeline


def is_pair(item: object) -> bool:
    """Return whether an item has the form (batch, target)."""
    return isinstance(item, (tuple, list)) and len(item) == 2


@dataclass(frozen=True)
class Destinations:
    """The devices that tensors go to.

    Attributes:
        devices: all GPUs that receive tensors; empty if everything stays on the host.
        inputs: for each model input, by name, its GPU; other inputs stay.
        target: the GPU of the last lane; None if that lane is in another process.
        names_of: a function from a batch to the names of its tensors; None if there is only one GPU.
        has_target: whether an item of two parts is a batch and its target.
    """

    devices: tuple[torch.device, ...] = ()
    inputs: Mapping[str, torch.device] = field(default_factory=dict)
    target: torch.device | None = None
    names_of: Callable[[object], Sequence[str]] | None = None
    has_target: bool = False

    def assign(self, item: Any) -> tuple[list[torch.Tensor], object, list[torch.device | None]]:  # noqa: ANN401 - any item
        """Return an item's tensors, a template of its structure, and the device of each tensor."""
        tensors, template = flatten(item, apart=True)
        first = self.devices[0]
        if self.names_of is None:
            return tensors, template, [first] * len(tensors)
        try:
            names = self.names_of(item[0] if self.has_target and is_pair(item) else item)
        except UsageError:  # not like the example: the step will raise
            return tensors, template, [first] * len(tensors)
        where = [self.inputs.get(name) for name in names]  # the tensors of the batch, which come first
        return tensors, template, where + [self.target] * (len(tensors) - len(where))


def destinations_on(device: torch.device) -> Destinations:
    """Return destinations that send everything to one device."""
    return Destinations((device,) if device.type == "cuda" else ())


def destinations_of(pipe: Pipeline, *, is_split: bool = False) -> Destinations:
    """Return the devices on which the pipeline's lanes in this process use their inputs.

    Args:
        pipe: the pipeline.
        is_split: whether items are always (batch, target).
    """
    own = set(pipe.lanes)
    devices = tuple(dict.fromkeys(pipe.devices[lane] for lane in pipe.lanes if pipe.devices[lane].type == "cuda"))
    if not devices or (len(own) == len(pipe.devices) and set(pipe.devices) == {devices[0]}):
        return Destinations(devices)
    wiring, target = pipe.internals.wiring(), None
    inputs: dict[str, torch.device] = {}
    last = len(wiring.feeds) - 1
    for way in pipe.schedule.ways:  # in bidirectional schedules, the first way decides
        for stage, feeds in enumerate(wiring.feeds):
            device = pipe.devices[way[stage]]
            if way[stage] not in own or device.type != "cuda":
                continue
            for feed in (*feeds, *(wiring.results if stage == last else ())):
                if feed.given:
                    inputs.setdefault(feed.given, device)
            if stage == last and target is None:
                target = device
    chain = pipe.internals.chain

    def names_of(batch: object) -> Sequence[str]:
        args, kwargs = arguments_of(batch, "batch")
        return chain.names(*args, **kwargs)

    return Destinations(devices, inputs, target, names_of, has_target=is_split or pipe.internals.loss is not None)
