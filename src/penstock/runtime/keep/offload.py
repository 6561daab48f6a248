"""Offload: boxes for the tensors that a forward saves, which can move to host memory and back.

    autograd's graph ──► box ──► tensor          on the device
                          └────► host buffer     after offload(), until fetch() or until the backward reads it

Only the graph owns a box; `Saved` has weak references. So the backward frees a saved tensor as soon as it would
without boxes.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

from penstock.devices.kinds import kind_of
from penstock.devices.sanitizer import unsanitized
from penstock.devices.streams import Event
from penstock.model.profiling.saved_tensors import (  # as in the profile, so that measured and simulated bytes agree
    storage_bytes,
    storage_of,
)

_Ready = Event | None  # a point in a stream; None if work is done when the call returns
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other subclasses may behave differently
_ALIGNMENT = 16  # bytes of the widest type; a copy begins at a multiple of it, so that views of any type are aligned


class HostPool:
    """Host memory that offloaded values use in turn; pinned if a GPU copies to it.

    Any thread may give memory back, even during garbage collection.

    >>> pool = HostPool()
    >>> first = pool.take(1000, torch.device("cpu"))
    >>> pool.give(first)
    >>> pool.take(900, torch.device("cpu")) is first, pool.num_bytes
    (True, 1000)
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # of the memory that the pool allocated and has not released
        self._lock = threading.Lock()
        self._given: deque[tuple[torch.Tensor, _Ready]] = deque()
        self._free: dict[bool, list[tuple[int, int, torch.Tensor, _Ready]]] = {False: [], True: []}

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of at least this size, for copies from a device.

        The current stream waits for the end of the last use of the memory.
        """
        is_pinned = device.type == "cuda"
        with self._lock:
            while self._given:  # only the thread with the lock takes; others only append
                buffer, used = self._given.popleft()
                bisect.insort(self._free[buffer.is_pinned()], (len(buffer), id(buffer), buffer, used))
            free = self._free[is_pinned]
            at = bisect.bisect_left(free, (num_bytes,))
            if at < len(free) and free[at][0] <= 2 * num_bytes:  # larger buffers are for larger tensors
                _, _, buffer, used = free.pop(at)
            else:
                buffer, used = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned), None
                self.num_bytes += num_bytes
        kind_of(device).wait_event(device, used)
        return buffer

    def give(self, buffer: torch.Tensor, used: _Ready = None) -> None:
        """Take back memory that is in use until an event."""
        self._given.append((buffer, used))

    def clear(self) -> None:
        """Release all memory that is not in use."""
        with self._lock:
            self.num_bytes -= sum(len(self._given.popleft()[0]) for _ in range(len(self._given)))
            self.num_bytes -= sum(size for free in self._free.values() for size, *_ in free)
            self._free = {False: [], True: []}


class StorageSet:
    """The memory of some tensors, such as parameters and buffers, which stay on the device in any case.

    >>> whole = torch.zeros(4, 4)
    >>> whole[1:] in StorageSet([whole]), whole.clone() in StorageSet([whole])
    (True, False)
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.storages = frozenset(storage_of(tensor) for tensor in tensors)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self.storages


class Saved:
    """The tensors that one forward of one stage saved.

    Args:
        pool: the pool of host memory.
        keep_storages: memory that stays on the device and is not counted.

    >>> weight, saved = torch.ones(3, requires_grad=True), Saved()
    >>> with saved.collecting():
    ...     loss = (weight * 2).square().sum()
    >>> saved.offload()
    >>> saved.num_bytes(on="device"), saved.num_bytes(on="host")
    (0, 12)
    >>> loss.backward()
    >>> weight.grad, saved.num_bytes(on="host")
    (tensor([8., 8., 8.]), 0)
    """

    def __init__(self, pool: HostPool | None = None, *, keep_storages: StorageSet | None = None) -> None:
        self._pool = pool or HostPool()
        self._keep = keep_storages or StorageSet()
        self._boxes: list[weakref.ref[_Box]] = []
        self._box_of: dict[object, weakref.ref[_Box]] = {}  # emptied before the address in a key can be reused
        self._made: dict[torch.device, _Ready] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Put the tensors that autograd saves into boxes."""
        with saved_tensors_hooks(self._pack, _Box.get):
            yield
        self._box_of.clear()
        devices = {box.tensor.device for box in self._live_boxes()}
        self._made = {device: kind_of(device).record_event(device) for device in devices}

    def _pack(self, tensor: torch.Tensor) -> _Box:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            box = _Box(tensor)
            if tensor not in self._keep:
                self._boxes.append(weakref.ref(box))
            return box
        # the modes of the forward are not needed here; with them, this would take ten times as long
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return self._pack_plain(tensor)

    def _pack_plain(self, tensor: torch.Tensor) -> _Box:
        storage = storage_of(tensor)
        if storage in self._keep.storages:
            return _Box(tensor)
        key = (storage, tensor.dtype, tensor._version, _place_of(tensor))
        known = self._box_of.get(key)
        box = None if known is None else known()
        if box is None:
            box = _Box(tensor)
            self._box_of[key] = reference = weakref.ref(box)
            self._boxes.append(reference)
        return box

    def offload(self) -> None:
        """Copy all tensors to host memory, and free their memory on the device.

        The copies are queued on the current stream, after the work that made the tensors.
        """
        self._box_of.clear()
        boxes_of: dict[int, list[_Box]] = {}
        for box in self._live_boxes():
            if box.host is None and box.can_move:
                boxes_of.setdefault(storage_of(box.tensor), []).append(box)
        devices = {boxes[0].tensor.device for boxes in boxes_of.values()}
        for device in devices:
            kind_of(device).wait_event(device, self._made.get(device))
        hosts = [_Host(self._pool, boxes) for boxes in boxes_of.values()]
        events = {device: kind_of(device).record_event(device) for device in devices}
        for host in hosts:
            host.used = events[host.device]

    def fetch(self) -> None:
        """Copy the tensors that the backward still needs back; the copies are queued on the current stream."""
        hosts = {id(box.host): box.host for box in self._live_boxes() if box.host is not None}
        _fetch(hosts.values())

    def clear(self) -> None:
        """Forget all boxes; autograd's graph keeps those that the backward still needs."""
        self._boxes.clear()

    def num_bytes(self, *, on: Literal["device", "host"]) -> int:
        """Return the bytes on the device or the host; each piece of memory counts once."""
        if on == "host":
            hosts = {id(box.host): box.host for box in self._live_boxes() if box.host is not None}
            return sum(host.num_bytes for host in hosts.values())
        tensors = {storage_of(box.tensor): box.tensor for box in self._live_boxes() if box.host is None}
        return sum(storage_bytes(tensor) for tensor in tensors.values())

    def _live_boxes(self) -> Iterator[_Box]:
        for reference in self._boxes:
            box = reference()
            if box is not None:
                yield box


class _Box:
    """A tensor that autograd saved.

    The box holds an alias, which shares the version counter of the tensor, even while the alias is empty. So changes in
    place after the forward are detected. The box must not hold the tensor itself: if it is an output, its graph leads
    back to the box.
    """

    __slots__ = ("__weakref__", "dtype", "host", "place", "ready", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.place: _Place | None = None
        self.host: _Host | None = None
        self.ready: _Ready = None

    @property
    def can_move(self) -> bool:
        """Whether the tensor is plain memory: not a subclass, sparse, quantized, or a conjugate or negative view."""
        tensor = self.tensor
        is_memory = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
        return is_memory and tensor.numel() > 0 and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())

    def get(self) -> torch.Tensor:
        """Return the tensor; if it is in host memory, copy it back first."""
        if self.host is not None:
            _fetch([self.host])
        if self.ready is not None:
            device = self.tensor.device
            kind_of(device).wait_event(device, self.ready)
            kind_of(device).hold(self.tensor)
            self.ready = None
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a saved {self.dtype} tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version};"
                f" expected version {self.version}. Change a copy of it instead"
            )
        return self.tensor


class _Host:
    """A copy in host memory of the storage that some boxes share, from the first byte that they use to the last."""

    used: _Ready
    _buffer: torch.Tensor | None

    def __init__(self, pool: HostPool, boxes: list[_Box]) -> None:
        self._pool, self._buffer, self.used = pool, None, None
        tensor = boxes[0].tensor
        self.device = tensor.device
        ends = []
        for box in boxes:
            kind_of(self.device).wait_event(self.device, box.ready)
            box.place = _place_of(box.tensor)
            offset, size, stride = box.place
            last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            ends.append((offset * box.dtype.itemsize, (last + 1) * box.dtype.itemsize))
        self.start = min(first for first, _ in ends) // _ALIGNMENT * _ALIGNMENT
        self.num_bytes = max(last for _, last in ends) - self.start
        self._boxes = [weakref.ref(box) for box in boxes]
        buffer = self._buffer = pool.take(self.num_bytes, self.device)
        source = _view(tensor.untyped_storage(), torch.uint8, (self.start, (self.num_bytes,), (1,)))
        buffer[: self.num_bytes].copy_(source, non_blocking=source.is_cuda)
        kind_of(self.device).hold(source)  # it is freed only when this copy is done
        for box in boxes:
            box.host = self
            box.tensor.data = box.tensor.new_empty(0)

    def restore(self) -> None:
        """Refill the boxes that autograd still references."""
        assert self._buffer is not None
        kind_of(self.device).wait_event(self.device, self.used)
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        memory.copy_(self._buffer[: self.num_bytes], non_blocking=memory.is_cuda)
        for reference in self._boxes:
            box = reference()
            if box is not None and box.place is not None:
                offset, size, stride = box.place
                place = (offset - self.start // box.dtype.itemsize, size, stride)
                box.tensor.data = _view(memory.untyped_storage(), box.dtype, place)
                box.host = None

    def release(self, used: _Ready) -> None:
        """Return the host memory to the pool; others may use it after this event."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give(buffer, used)

    def set_ready(self, event: _Ready) -> None:
        """Let the boxes wait for the copy before they are used."""
        for reference in self._boxes:
            box = reference()
            if box is not None:
                box.ready = event

    def __del__(self) -> None:
        self.release(self.used)


def _fetch(hosts: Iterable[_Host]) -> None:
    hosts = list(hosts)
    for host in hosts:
        host.restore()
    events = {device: kind_of(device).record_event(device) for device in {host.device for host in hosts}}
    for host in hosts:
        host.set_ready(events[host.device])
        host.release(events[host.device])


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, size and stride, in elements


def _place_of(tensor: torch.Tensor) -> _Place:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, place: _Place) -> torch.Tensor:
    with unsanitized():  # the sanitizer would treat this as a write
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
