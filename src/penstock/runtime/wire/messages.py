"""Messages: the binary format of the values that processes send to each other.

A message begins with a head of numbers. Its description (types, shapes, which values require a gradient) is sent only
once, and gets a number. Later messages carry this number instead, so only a few numbers travel with the values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from penstock.errors import LaneError
from penstock.runtime.wire.transport import Key

_ALIGN = 64
_KINDS = ("F", "B", "R")
HEAD = struct.Struct("<IIBIIIIIQ")  # step, samples, kind, source, target, mb, description, carrier, bytes

INLINE = 0xFFFFFFFF  # the values follow the head

# dtypes that numpy has too; its conversion to bytes is the fastest
_OF_NUMPY = frozenset({torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.bool})


@dataclass(frozen=True)
class Part:
    """One value of a message: the type, the shape and the place of a tensor, or a plain value.

    `order` lists the dimensions as they lie in memory, outermost first; it is empty for a contiguous tensor. The
    receiver restores this order, because a `view` in the next stage may fit a transposed tensor but not a contiguous
    copy of it.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    wants_grad: bool = False
    order: tuple[int, ...] = ()
    offset: int = 0
    num_bytes: int = 0
    plain: Any = None

    def place(self, room: torch.Tensor) -> torch.Tensor:
        """Return the tensor at this place in a buffer."""
        plain = room[self.offset : self.offset + self.num_bytes].view(self.dtype or torch.uint8)
        if not self.order:
            return plain.view(self.shape)
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return plain.view([self.shape[dim] for dim in self.order]).permute(back)


@dataclass(frozen=True)
class Description:
    """All values of a message, and the number of bytes that they take."""

    parts: tuple[Part, ...]
    num_bytes: int

    def to_json(self) -> bytes:
        """Return the description as JSON text."""
        rows = [
            [str(p.dtype).removeprefix("torch."), list(p.shape), p.wants_grad, list(p.order)]
            if p.dtype is not None
            else [None, p.plain]
            for p in self.parts
        ]
        return json.dumps(rows).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Description:
        """Return the description that `to_json` wrote."""
        found: list[Part] = []
        for row in json.loads(text):
            if row[0] is None:
                found.append(Part(None, plain=row[1]))
                continue
            dtype = getattr(torch, row[0], None)
            if not isinstance(dtype, torch.dtype):
                raise LaneError(f"a message has a dtype that this torch does not have: {row[0]!r:.40}")
            found.append(Part(dtype, tuple(map(int, row[1])), bool(row[2]), tuple(map(int, row[3]))))
        return _placed(found)

    def write(self, values: Sequence[Any], room: torch.Tensor) -> None:
        """Copy the values into a buffer."""
        for part, value in zip(self.parts, values, strict=True):
            if part.dtype is not None and part.num_bytes:
                part.place(room).copy_(value)

    def to_bytes(self, values: Sequence[Any]) -> bytes:
        """Return the values of a small message as bytes."""
        first = self.parts[0] if len(self.parts) == 1 else Part(None)
        if first.dtype in _OF_NUMPY and self.num_bytes == first.num_bytes and not first.order:
            plain: bytes = values[0].detach().cpu().numpy().tobytes()
            return plain
        room = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.write(values, room)
        return room.numpy().tobytes()

    def from_bytes(self, data: bytes, device: torch.device) -> list[Any]:
        """Return the values that `to_bytes` wrote."""
        room = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return self.read(room, device)

    def read(self, room: torch.Tensor, device: torch.device) -> list[Any]:
        """Return the values; on the CPU, they are views of the buffer."""
        found: list[Any] = []
        for part in self.parts:
            if part.dtype is None:
                found.append(part.plain)
                continue
            if part.num_bytes:
                value = part.place(room)
            else:
                value = torch.empty(part.shape, dtype=part.dtype)
            if device.type != "cpu":
                value = value.to(device)
            found.append(value.requires_grad_(True) if part.wants_grad else value)
        return found


def _placed(parts: Sequence[Part]) -> Description:
    """Return a description that gives each part its place in one buffer."""
    placed, at = [], 0
    for part in parts:
        num_bytes = 0 if part.dtype is None else part.dtype.itemsize * math.prod(part.shape)
        placed.append(replace(part, offset=at, num_bytes=num_bytes))
        at += -(-num_bytes // _ALIGN) * _ALIGN
    return Description(tuple(placed), at)


def describe(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the key of a description: messages with equal keys have equal descriptions."""
    return tuple(
        (v.dtype, v.shape, v.requires_grad, None if v.layout is not torch.strided or v.is_contiguous() else v.stride())
        if isinstance(v, torch.Tensor)
        else (None, v)
        for v in values
    )


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor in the memory order of a copy that torch makes; () if it is contiguous."""
    strides = torch.empty_like(tensor, device="meta").stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(tensor.dim())) else order


class SentDescriptions:
    """The descriptions that one receiver already has, with their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], tuple[int, Description]] = {}

    def number(self, values: Sequence[Any]) -> tuple[int, Description, bool]:
        """Return the number of a message's description, the description, and whether it is new."""
        key = describe(values)
        known = self._numbers.get(key)
        if known is not None:
            return *known, False
        if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in values):
            raise LaneError("a stage sends a sparse tensor, which cannot go to another process: move the cut")
        parts = []
        for (dtype, *rest), value in zip(key, values, strict=True):
            if dtype is None:
                if not isinstance(rest[0], (int, float, bool, str, type(None))):
                    raise LaneError(
                        f"a stage sends a value of type {type(rest[0]).__name__}, which cannot go to another process"
                    )
                parts.append(Part(None, plain=rest[0]))
            else:
                parts.append(Part(dtype, tuple(rest[0]), rest[1], () if rest[2] is None else _order_of(value)))
        made = (len(self._numbers), _placed(parts))
        self._numbers[key] = made
        return *made, True


class Head(NamedTuple):
    """The numbers at the front of a message."""

    step: int
    num_samples: int
    key: Key
    description: int
    carrier: int  # INLINE, or a number that the value carrier chose
    num_bytes: int

    def pack(self) -> bytes:
        """Return the head as bytes."""
        k = self.key
        return HEAD.pack(
            self.step, self.num_samples, _KINDS.index(k.kind), k.source, k.target, k.mb,
            self.description, self.carrier, self.num_bytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, body: bytes) -> Head:
        """Return the head at the start of a message."""
        step, samples, kind, source, target, mb, description, carrier, num_bytes = HEAD.unpack_from(body)
        return cls(step, samples, Key(_KINDS[kind], source, target, mb), description, carrier, num_bytes)
