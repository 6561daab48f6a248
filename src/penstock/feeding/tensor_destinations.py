"""Places: the GPU that each tensor of a loader's item goes to: that of the lane which uses it first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.model.example import arguments_of
from penstock.model.structure import flatten
from penstock.pipeline.pipeline import Pipeline

__all__ = ["Places", "is_pair", "places_of", "places_on"]


def is_pair(item: object) -> bool:
    """Say whether an item has the form of a batch and its target."""
    return isinstance(item, (tuple, list)) and len(item) == 2


@dataclass(frozen=True)
class Places:
    """Where tensors go.

    Attributes:
        devices: all GPUs that something goes to; none where all stays on the host.
        inputs: for each input of the model, by name, its GPU; what is not there stays.
        target: the GPU of the lane that ends the model; None where that is not here.
        names_of: from a batch to the name of each of its tensors; None where all goes to the one GPU there is.
        has_target: an item of two things is a batch and its target.
    """

    devices: tuple[torch.device, ...] = ()
    inputs: Mapping[str, torch.device] = field(default_factory=dict)
    target: torch.device | None = None
    names_of: Callable[[object], Sequence[str]] | None = None
    has_target: bool = False

    def assign(self, item: Any) -> tuple[list[torch.Tensor], object, list[torch.device | None]]:  # noqa: ANN401 - whatever a loader gives
        """Return the tensors in an item, a template of what is around them, and where each goes."""
        tensors, template = flatten(item, apart=True)
        first = self.devices[0]
        if self.names_of is None:
            return tensors, template, [first] * len(tensors)
        try:
            names = self.names_of(item[0] if self.has_target and is_pair(item) else item)
        except UsageError:  # not like the example: the step will say so
            return tensors, template, [first] * len(tensors)
        where = [self.inputs.get(name) for name in names]  # the batch's own tensors, which come first
        return tensors, template, where + [self.target] * (len(tensors) - len(where))


def places_on(device: torch.device) -> Places:
    """Return the places where all goes to one device."""
    return Places((device,) if device.type == "cuda" else ())


def places_of(pipe: Pipeline, *, is_split: bool = False) -> Places:
    """Return where a pipeline uses what it is given, as far as its lanes run in this process.

    Args:
        pipe: the pipeline.
        is_split: items are sure to be a batch and its target.
    """
    own = set(pipe.lanes)
    devices = tuple(dict.fromkeys(pipe.devices[lane] for lane in pipe.lanes if pipe.devices[lane].type == "cuda"))
    if not devices or (len(own) == len(pipe.devices) and set(pipe.devices) == {devices[0]}):
        return Places(devices)
    wiring, target = pipe.internals.wiring(), None
    inputs: dict[str, torch.device] = {}
    last = len(wiring.feeds) - 1
    for way in pipe.schedule.ways:  # where micro-batches go both ways, a batch is put where the first way uses it
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

    return Places(devices, inputs, target, names_of, has_target=is_split or pipe.internals.loss is not None)
