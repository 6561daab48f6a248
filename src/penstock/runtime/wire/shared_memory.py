"""Segments: memory that two processes of one machine share; the sender copies values in, the receiver reads them there.

A segment is anonymous (memfd): its file descriptor travels over a Unix socket, and nothing is left behind in any
folder, even by a process that is killed. Its first bytes say whether it is in use: the sender takes one that is
free, the receiver frees it when the last tensor that lies in it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from penstock.runtime.wire.messages import Description, Head
from penstock.runtime.wire.transport import Payload
from penstock.runtime.wire.value_carrier import Announce, Introduce

__all__ = ["SharedMemory", "is_available"]

HEAD_BYTES = 64  # before the values: whether it is in use; values stay aligned
_SMALLEST = 1 << 16
_INTRODUCTION = struct.Struct("<IQ")  # the number of a segment, and its bytes


def is_available() -> bool:
    """Return whether this system has such memory."""
    return hasattr(os, "memfd_create")


class Segment:
    """One piece of shared memory, mapped into this process."""

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        self.number, self.num_bytes = number, num_bytes
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, HEAD_BYTES + num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)[HEAD_BYTES:]

    @property
    def is_free(self) -> bool:
        """Is nothing in it that is still wanted?"""
        return self.memory[0] == 0

    def take(self) -> None:
        """Mark it as in use."""
        self.memory[0] = 1

    def close(self) -> None:
        """Forget the file; the memory goes when the last process unmaps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Outgoing:
    """The segments for one receiver: taken when free, made when none is."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Segment]] = {}
        self._count = 0

    def take(self, num_bytes: int) -> tuple[Segment, bool]:
        """Return a segment for so many bytes, marked as in use, and whether it is new to the receiver."""
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        known = self._by_size.setdefault(size, [])
        for segment in known:  # always from the first on: what was used last is still in the cache
            if segment.is_free:
                segment.take()
                return segment, False
        descriptor = os.memfd_create("penstock")
        os.ftruncate(descriptor, HEAD_BYTES + size)
        segment = Segment(self._count, descriptor, size)
        self._count += 1
        segment.take()
        known.append(segment)
        return segment, True

    def close(self) -> None:
        """Forget all."""
        for segments in self._by_size.values():
            for segment in segments:
                segment.close()
        self._by_size.clear()


class Incoming:
    """The segments of one sender, by number."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, number: int, descriptor: int, num_bytes: int) -> None:
        """Learn of a segment."""
        segment = Segment(number, descriptor, num_bytes)
        segment.close()  # mapped; the file is not needed any more
        self._segments[number] = segment

    def read(self, number: int, num_bytes: int) -> torch.Tensor:
        """Return a segment's bytes as a tensor; the segment is free again when no view of it is left."""
        memory = self._segments[number].memory
        lease: Any = _lease(num_bytes).from_buffer(memory, HEAD_BYTES)
        lease.memory = memory
        return torch.frombuffer(lease, dtype=torch.uint8)


class _Lease:
    """Bytes that free their segment when they go; torch keeps them as long as a tensor lies in them."""

    memory: mmap.mmap

    def __del__(self) -> None:
        self.memory[0] = 0


@cache
def _lease(num_bytes: int) -> Any:  # noqa: ANN401 - ctypes has no name for it
    return type("Lease", (_Lease, ctypes.c_uint8 * num_bytes), {})


class SharedMemory:
    """Carries values through segments: one copy by the sender, and none by the receiver."""

    beside_bytes = 1 << 18
    needs_reader = False

    def __init__(self) -> None:
        self._outgoing: defaultdict[int, Outgoing] = defaultdict(Outgoing)
        self._incoming: defaultdict[int, Incoming] = defaultdict(Incoming)

    def send(
        self, to_lane: int, description: Description, payload: Payload, *, announce: Announce, introduce: Introduce
    ) -> None:
        """Copy values into memory that the receiver sees, and tell it."""
        segment, is_new = self._outgoing[to_lane].take(description.num_bytes)
        description.write(payload, segment.bytes)
        if is_new:
            introduce(_INTRODUCTION.pack(segment.number, segment.num_bytes), (segment.descriptor,))
        announce(segment.number, b"")

    def introduced(self, from_lane: int, body: bytes, descriptor: Callable[[], int]) -> None:
        """Map a segment of the sender."""
        number, num_bytes = _INTRODUCTION.unpack(body)
        self._incoming[from_lane].add(number, descriptor(), num_bytes)

    def arrived(self, from_lane: int, head: Head, body: bytes) -> None:
        """The values are there."""

    def receive(self, from_lane: int, head: Head, arrived: None) -> torch.Tensor:  # noqa: ARG002 - as the interface
        """Return a view of the segment."""
        return self._incoming[from_lane].read(head.carrier, head.num_bytes)

    def drop(self, from_lane: int, head: Head, arrived: None) -> None:
        """Free the segment: the view is gone at once."""
        self.receive(from_lane, head, arrived)

    def forget(self) -> None:
        """A segment is free when its receiver lets go of it."""

    def close(self) -> None:
        """Forget all segments for other processes."""
        for outgoing in self._outgoing.values():
            outgoing.close()
