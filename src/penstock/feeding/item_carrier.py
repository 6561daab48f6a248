"""Carrier: take a loader's item apart, send its tensors to where they are used, and put it together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.devices.streams import current_stream
from penstock.errors import UsageError
from penstock.feeding.pinned_staging import Ready, Staged, Staging, is_plain, mark
from penstock.feeding.tensor_destinations import Places
from penstock.model.structure import rebuild

__all__ = ["Carrier", "Lifted", "Parcel", "Split"]

Split = Callable[[Any], tuple[Any, Any]]


@dataclass
class Lifted:
    """An item that could be sent: as it is, or with its tensors in pinned memory.

    Attributes:
        item: where all of it stays on the host; else its template.
        staged: its tensors, each once.
        order: for each slot of the template, which of them.
    """

    item: Any
    staged: Staged | None = None
    order: Sequence[int] = ()


@dataclass
class Parcel:
    """An item on its way to the user.

    Attributes:
        item: what the user gets.
        ready: for each GPU the event behind the copies to it.
        on_gpu: the tensors that are there.
        state: of the loader, after it gave the item.
    """

    item: Any
    ready: Sequence[Ready] = ()
    on_gpu: Sequence[torch.Tensor] = ()
    state: Any = field(default=None, repr=False)

    def receive(self) -> Any:  # noqa: ANN401 - as the loader's item
        """Return the item; what the caller's streams do from now on waits for its copies, the host does not."""
        streams = {device: current_stream(device) for device, _ in self.ready}
        for device, event in self.ready:
            streams[device].wait_event(event)
        for tensor in self.on_gpu:  # the copy stream's memory: not to be used again before the caller is done with it
            tensor.record_stream(streams.get(tensor.device) or current_stream(tensor.device))
        return self.item


class Carrier:
    """Carries items of one feed; used by one thread at a time.

    Args:
        places: where tensors go.
        split: from an item to a batch and its target.
    """

    def __init__(self, places: Places, split: Split | None) -> None:
        self._places, self._split = places, split
        self.devices = places.devices
        self.staging = Staging(places.devices) if places.devices else None

    def lift(self, item: Any) -> Lifted:  # noqa: ANN401 - whatever a loader gives
        """Do what can be done before there is room for an item where it goes."""
        if self._split is not None:
            item = _checked(self._split(item))
        if self.staging is None:
            return Lifted(item)
        tensors, template, devices = self._places.assign(item)
        place_of: dict[tuple[int, torch.device | None], int] = {}
        order: list[int] = []
        once: list[int] = []
        for at, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
            place = place_of.setdefault((id(tensor), device), len(once))
            if place == len(once):  # one that is there twice is copied once
                once.append(at)
            order.append(place)
        staged = self.staging.stage([tensors[at] for at in once], [devices[at] for at in once])
        return Lifted(template, staged, order)

    def send(self, lifted: Lifted, state: Any) -> Parcel:  # noqa: ANN401 - the loader's
        """Send an item off; nobody waits."""
        if self.staging is None or lifted.staged is None:
            return Parcel(lifted.item, state=state)
        sent, ready = self.staging.send(lifted.staged)
        on_gpu = [tensor for tensor in sent if tensor.is_cuda and is_plain(tensor)]
        # what the loader itself put on a GPU it made on streams of this thread
        stays = zip(sent, lifted.staged.devices, strict=True)
        own = {tensor.device for tensor, device in stays if device is None and tensor.is_cuda}
        ready += [(device, mark(current_stream(device))) for device in own]
        return Parcel(rebuild(lifted.item, [sent[place] for place in lifted.order]), ready, on_gpu, state)

    def settle(self) -> None:
        """Wait until the loader may write again to what it gave."""
        if self.staging is not None:
            self.staging.settle()

    def clear(self) -> None:
        """Let go of pinned memory."""
        if self.staging is not None:
            self.staging.clear()


def _checked(pair: Any) -> tuple[Any, Any]:  # noqa: ANN401 - what the user's function returns
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UsageError(f"split: must return (batch, target); returned: {type(pair).__name__}")
    return pair[0], pair[1]
