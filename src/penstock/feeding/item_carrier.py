"""Item carrier: take a loader's item apart, send its tensors to their devices, and put it together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import current_stream
from penstock.errors import UsageError
from penstock.feeding.pinned_staging import Ready, StagedTensors, Staging, is_plain
from penstock.model.example import arguments_of
from penstock.model.structure import flatten, rebuild
from penstock.pipeline.pipeline import Pipeline

Split = Callable[[Any], tuple[Any, Any]]


def is_pair(item: object) -> bool:
    """Return whether an item has the form (batch, target)."""
    return isinstance(item, (tuple, list)) and len(item) == 2


@dataclass(frozen=True)
class Destinations:
    """For each tensor of an item, the GPU of the lane that uses it first."""

    devices: tuple[torch.device, ...] = ()  # all GPUs that receive tensors; empty if everything stays on the host
    inputs: Mapping[str, torch.device] = field(default_factory=dict)  # by the names of the model; other inputs stay
    target: torch.device | None = None  # the GPU of the last lane; None if that lane is in another process
    names_of: Callable[[object], Sequence[str]] | None = None  # of a batch's tensors; None if there is only one GPU
    has_target: bool = False  # whether an item of two parts is a batch and its target

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


def destinations_of(pipe: Pipeline, *, is_split: bool) -> Destinations:
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


@dataclass
class StagedItem:
    """An item that is ready to send: unchanged, or with its tensors in pinned memory."""

    item: Any  # the item if it stays on the host, otherwise its template
    staged: StagedTensors | None = None  # its tensors, each once
    order: Sequence[int] = ()  # for each slot of the template, the index of its tensor


@dataclass
class SentItem:
    """An item that was sent."""

    item: Any  # what the user gets
    ready: Sequence[Ready] = ()  # for each GPU, the event after the copies to it
    on_gpu: Sequence[torch.Tensor] = ()
    state: Any = field(default=None, repr=False)  # the loader's, after it returned the item

    def receive(self) -> Any:  # noqa: ANN401 - as the loader's item
        """Return the item; the caller's streams wait for its copies, but the host does not."""
        streams = {device: current_stream(device) for device, _ in self.ready}
        for device, event in self.ready:
            streams[device].wait_event(event)
        for tensor in self.on_gpu:  # memory of the copy stream: keep it until the caller's stream is done
            tensor.record_stream(streams.get(tensor.device) or current_stream(tensor.device))
        return self.item


class Carrier:
    """Sends the items of one feed; used by one thread at a time."""

    def __init__(self, destinations: Destinations, split: Split | None) -> None:
        self._destinations, self._split = destinations, split
        self.devices = destinations.devices
        self.staging = Staging(destinations.devices)

    def stage(self, item: Any) -> StagedItem:  # noqa: ANN401 - any item
        """Prepare an item for sending, before its destination has space."""
        if self._split is not None:
            item = _checked(self._split(item))
        if not self.devices:
            return StagedItem(item)
        tensors, template, devices = self._destinations.assign(item)
        place_of: dict[tuple[int, torch.device | None], int] = {}
        order: list[int] = []
        once: list[int] = []
        for at, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
            place = place_of.setdefault((id(tensor), device), len(once))
            if place == len(once):  # copy a tensor only once, even if the item contains it twice
                once.append(at)
            order.append(place)
        staged = self.staging.stage([tensors[at] for at in once], [devices[at] for at in once])
        return StagedItem(template, staged, order)

    def send(self, staged_item: StagedItem, state: Any) -> SentItem:  # noqa: ANN401 - the loader's
        """Send an item; nothing waits."""
        if staged_item.staged is None:
            return SentItem(staged_item.item, state=state)
        sent, ready = self.staging.send(staged_item.staged)
        on_gpu = [tensor for tensor in sent if tensor.is_cuda and is_plain(tensor)]
        # tensors that the loader put on a GPU were made on this thread's current streams
        stays = zip(sent, staged_item.staged.devices, strict=True)
        own = {tensor.device for tensor, device in stays if device is None and tensor.is_cuda}
        ready += [(device, blocking_event(current_stream(device))) for device in own]
        return SentItem(rebuild(staged_item.item, [sent[place] for place in staged_item.order]), ready, on_gpu, state)


def _checked(pair: Any) -> tuple[Any, Any]:  # noqa: ANN401 - the result of a user function
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UsageError(f"split: must return (batch, target); returned: {type(pair).__name__}")
    return pair[0], pair[1]
