"""Shared memory: segments that two processes of one machine share; the sender writes values, the receiver reads them.

A segment is anonymous (memfd), and its file descriptor travels over a Unix socket. So no file remains in any folder,
even if a process is killed. The first bytes of a segment show whether it is in use: the sender takes a free segment,
and the receiver frees it when the last tensor in it is gone.
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
from penstock.runtime.wire.transport import Announce, Introduce, Payload

HEAD_BYTES = 64  # before the values: the flag for "in use"; 64 keeps the values aligned
_SMALLEST = 1 << 16
_INTRODUCTION = struct.Struct("<IQ")  # the number of a segment, and its size in bytes


def is_available() -> bool:
    """Return whether this system supports such segments."""
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
        """Whether no tensor uses the segment any more."""
        return self.memory[0] == 0

    def take(self) -> None:
        """Mark the segment as in use."""
        self.memory[0] = 1

    def close(self) -> None:
        """Close the file; the memory is freed when the last process unmaps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Outgoing:
    """The segments for one receiver: a free one is used again; if none is free, a new one is made."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Segment]] = {}
        self._count = 0

    def take(self, num_bytes: int) -> tuple[Segment, bool]:
        """Return a segment for `num_bytes`, marked as in use, and whether it is new to the receiver."""
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        known = self._by_size.setdefault(size, [])
        for segment in known:  # always search from the first: recently used memory is still in the cache
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
        """Close all segments."""
        for segments in self._by_size.values():
            for segment in segments:
                segment.close()
        self._by_size.clear()


class Incoming:
    """The segments of one sender, by number."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, number: int, descriptor: int, num_bytes: int) -> None:
        """Map a segment that the sender made."""
        segment = Segment(number, descriptor, num_bytes)
        segment.close()  # the memory is mapped, so the file is no longer needed
        self._segments[number] = segment

    def read(self, number: int, num_bytes: int) -> torch.Tensor:
        """Return a segment's bytes as a tensor; the segment is free again when the last view of it is gone."""
        memory = self._segments[number].memory
        lease: Any = _lease(num_bytes).from_buffer(memory, HEAD_BYTES)
        lease.memory = memory
        return torch.frombuffer(lease, dtype=torch.uint8)


class _Lease:
    """Bytes that free their segment when they are deleted; torch keeps them as long as a tensor uses them."""

    memory: mmap.mmap

    def __del__(self) -> None:
        self.memory[0] = 0


@cache
def _lease(num_bytes: int) -> Any:  # noqa: ANN401 - ctypes has no name for this type
    return type("Lease", (_Lease, ctypes.c_uint8 * num_bytes), {})


class SharedMemory:
    """A value carrier that uses segments: the sender copies the values once, the receiver never."""

    threaded_bytes = 1 << 18
    needs_reader = False

    def __init__(self) -> None:
        self._outgoing: defaultdict[int, Outgoing] = defaultdict(Outgoing)
        self._incoming: defaultdict[int, Incoming] = defaultdict(Incoming)

    def send(
        self, to_lane: int, description: Description, payload: Payload, *, announce: Announce, introduce: Introduce
    ) -> None:
        """Copy values into a segment, and announce it to the receiver."""
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
        """Do nothing: the values are already in the segment."""

    def receive(self, from_lane: int, head: Head, arrived: None) -> torch.Tensor:  # noqa: ARG002 - as in the protocol
        """Return a view of the segment."""
        return self._incoming[from_lane].read(head.carrier, head.num_bytes)

    def drop(self, from_lane: int, head: Head, arrived: None) -> None:
        """Free the segment: make a view of it, and drop the view at once."""
        self.receive(from_lane, head, arrived)

    def forget(self) -> None:
        """Do nothing: the receiver frees its segments."""

    def close(self) -> None:
        """Close all segments for other processes."""
        for outgoing in self._outgoing.values():
            outgoing.close()
