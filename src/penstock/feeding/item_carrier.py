"""Item carrier: take a loader's item apart, send its tensors to their devices, and put it together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import current_stream
from penstock.errors import UsageError
from penstock.feeding.pinned_staging import Ready, StagedTensors, Staging, is_plain
from penstock.feeding.tensor_destinations import Destinations
from penstock.model.structure import rebuild

Split = Callable[[Any], tuple[Any, Any]]


@dataclass
class StagedItem:
    """An item that is ready to send: unchanged, or with its tensors in pinned memory.

    Attributes:
        item: the item if it stays on the host, otherwise its template.
        staged: its tensors, each once.
        order: for each slot of the template, the index of its tensor.
    """

    item: Any
    staged: StagedTensors | None = None
    order: Sequence[int] = ()


@dataclass
class SentItem:
    """An item that was sent.

    Attributes:
        item: the item that the user gets.
        ready: for each GPU, the event after the copies to it.
        on_gpu: the tensors on GPUs.
        state: the loader's state after it returned the item.
    """

    item: Any
    ready: Sequence[Ready] = ()
    on_gpu: Sequence[torch.Tensor] = ()
    state: Any = field(default=None, repr=False)

    def receive(self) -> Any:  # noqa: ANN401 - as the loader's item
        """Return the item; the caller's streams wait for its copies, but the host does not."""
        streams = {device: current_stream(device) for device, _ in self.ready}
        for device, event in self.ready:
            streams[device].wait_event(event)
        for tensor in self.on_gpu:  # memory of the copy stream: keep it until the caller's stream is done
            tensor.record_stream(streams.get(tensor.device) or current_stream(tensor.device))
        return self.item


class Carrier:
    """Sends the items of one feed; used by one thread at a time.

    Args:
        destinations: the device of each tensor.
        split: a function from an item to a batch and its target.
    """

    def __init__(self, destinations: Destinations, split: Split | None) -> None:
        self._destinations, self._split = destinations, split
        self.devices = destinations.devices
        self.staging = Staging(destinations.devices) if destinations.devices else None

    def stage(self, item: Any) -> StagedItem:  # noqa: ANN401 - any item
        """Prepare an item for sending, before its destination has space."""
        if self._split is not None:
            item = _checked(self._split(item))
        if self.staging is None:
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
        if self.staging is None or staged_item.staged is None:
            return SentItem(staged_item.item, state=state)
        sent, ready = self.staging.send(staged_item.staged)
        on_gpu = [tensor for tensor in sent if tensor.is_cuda and is_plain(tensor)]
        # tensors that the loader put on a GPU were made on this thread's current streams
        stays = zip(sent, staged_item.staged.devices, strict=True)
        own = {tensor.device for tensor, device in stays if device is None and tensor.is_cuda}
        ready += [(device, blocking_event(current_stream(device))) for device in own]
        return SentItem(rebuild(staged_item.item, [sent[place] for place in staged_item.order]), ready, on_gpu, state)

    def wait_for_sources(self) -> None:
        """Wait until the loader may overwrite the tensors of its last item."""
        if self.staging is not None:
            self.staging.wait_for_sources()

    def clear(self) -> None:
        """Free the pinned memory."""
        if self.staging is not None:
            self.staging.clear()


def _checked(pair: Any) -> tuple[Any, Any]:  # noqa: ANN401 - the result of a user function
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UsageError(f"split: must return (batch, target); returned: {type(pair).__name__}")
    return pair[0], pair[1]
