"""Batch comparison: a check that all processes have the same batches, by digests that take a few bytes.

Processes compare digests at the end of a call. All lanes have begun the call by then, so no process has to wait. A
digest of GPU tensors is known only after the call. It is compared at once in the first calls, and later at the end of
the next call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from penstock.devices.kinds import kind_of
from penstock.devices.streams import Event
from penstock.errors import LostError
from penstock.model.structure import flatten
from penstock.runtime.step import Step
from penstock.runtime.wire.process_transport import ProcessTransport

_COMPARED_FIRST, _COMPARED_EVERY = 3, 50  # the first calls of each kind are compared, then every 50th
_SAME = (
    "Each lane uses its part of every batch, so give every process the same batches in the same order: use no "
    "DistributedSampler, and shuffle with the same seed in all processes (docs/howto/processes.md)"
)
_MAX_WHOLE_VALUES = 1 << 14  # values; only a sample of a larger tensor is read
_SAMPLE = 1 << 12
_GOLDEN = (math.sqrt(5) - 1) / 2  # a stride of this share of a tensor spreads the sample evenly
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size: any type is read as one of these
_PLAIN = (bool, int, float, str, bytes)

Row = list[Any]  # the name, the type, the shape and the digest of one value in a batch


class BatchComparison:
    """The batches of this process that have not been compared yet."""

    def __init__(self, transport: ProcessTransport, num_lanes: int) -> None:
        self._transport, self._num_lanes = transport, num_lanes
        self._digests: dict[int, Digest] = {}  # by step
        self._num_ended: dict[tuple[bool, bool], int] = {}  # calls of each kind that have ended
        self._latest = (0, (False, False))  # the number and the kind of the latest call

    def clear(self) -> None:
        """Forget all batches and all calls."""
        self._digests.clear()
        self._num_ended.clear()

    def forget_latest(self) -> None:
        """Do not compare the batch of the latest call."""
        self._digests.pop(self._latest[0], None)

    def look(self, step: Step) -> None:
        """Compute the digest of a batch if it must be compared; if it is known at once, send it to the others."""
        kind = (step.mode.is_training, step.mode.has_backward)
        self._latest = (step.number, kind)
        is_capture = step.tapes is not None and not all(tape.is_replay for tape in step.tapes.values())
        is_due = self._num_ended.get(kind, 0) < _COMPARED_FIRST or step.number % _COMPARED_EVERY == 0
        if step.given and is_due and not is_capture:
            digest = self._digests[step.number] = Digest(step.given, step.number)
            if digest.is_ready:
                self._tell(step.number, digest)

    def _tell(self, number: int, digest: Digest) -> None:
        try:
            for other in self._transport.links.peers:
                self._transport.send_message(other, f"batch {number}", digest.rows())
        except LostError:
            self._transport.check()  # raises the reason, if the lost process sent one before it left
            raise

    def compare(self) -> str:
        """End a call; return a message about the differences between batches that are known by now, or "".

        All processes return the same message at the end of the same call.
        """
        now, kind = self._latest
        latest = self._digests.get(now)
        if latest is not None and not latest.is_ready:
            self._tell(now, latest)
        ended = self._num_ended[kind] = self._num_ended.get(kind, 0) + 1
        found: list[str] = []
        for number in [number for number in self._digests if number < now or ended <= _COMPARED_FIRST]:
            own = self._digests.pop(number).rows()
            everyone = [
                own if lane == self._transport.lane else self._transport.receive_message(lane, f"batch {number}")
                for lane in range(self._num_lanes)
            ]
            found += [f"in call {number} {told}" for told in differences(everyone)]
        return f"the processes were given different batches: {'; '.join(found)}. {_SAME}" if found else ""


class Digest:
    """The digest of a batch and its target. Values of a GPU are still being copied when the constructor returns.

    Args:
        given: the batch, and its target if there is one.
        number: the number of the step; each step takes another sample of large tensors.
    """

    def __init__(self, given: Sequence[Any], number: int) -> None:
        self._number = number
        self._events: dict[torch.device, Event] = {}
        self._rows: list[tuple[Row, torch.Tensor | None]] = []
        with torch.no_grad():
            for what, thing in zip(("batch", "target"), given, strict=False):
                # the target may be None on a lane that does not need it
                for name, leaf in () if thing is None else _leaves(thing, what):
                    self._add(name, leaf)

    def _add(self, name: str, leaf: object) -> None:
        if not isinstance(leaf, torch.Tensor):
            self._rows.append(([name, type(leaf).__name__, [], f"{leaf!r:.60}"], None))
            return
        row = [name, str(leaf.dtype).removeprefix("torch."), list(leaf.shape), ""]
        self._rows.append((row, self._on_host(_sample(leaf, self._number))))

    def _on_host(self, sample: torch.Tensor | None) -> torch.Tensor | None:
        if sample is None or not sample.is_cuda:
            return sample
        room = torch.empty(sample.shape, dtype=sample.dtype, pin_memory=True)
        room.copy_(sample, non_blocking=True)
        event = kind_of(sample.device).record_event(sample.device)
        if event is not None:
            self._events[sample.device] = event
        return room

    @property
    def is_ready(self) -> bool:
        """Whether `rows` returns without waiting for a GPU."""
        return not self._events

    def rows(self) -> list[Row]:
        """Return one row per value in the batch and its target; wait for values that come from a GPU."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()
        for row, sample in self._rows:
            if sample is not None:
                row[3] = blake2b(sample.contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        self._rows = [(row, None) for row, _ in self._rows]  # drop the values of the batch
        return [row for row, _ in self._rows]


def _leaves(thing: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield tensors and plain values with their names; for other objects, yield only the tensors that they hold."""
    if isinstance(thing, torch.Tensor) or thing is None or isinstance(thing, _PLAIN):
        yield name, thing
    elif isinstance(thing, Mapping):
        for key in thing:
            yield from _leaves(thing[key], f"{name}[{key!r}]")
    elif isinstance(thing, (list, tuple)):
        for index, part in enumerate(thing):
            yield from _leaves(part, f"{name}[{index}]")
    else:
        for index, tensor in enumerate(flatten(thing, apart=True)[0]):
            yield f"{name}, tensor {index}", tensor


def _sample(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    """Return some values of a tensor, or all if it is small; None if it does not hold plain values."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    words = _WORDS.get(plain.element_size())
    if words is None:
        return None
    plain, count = plain.view(words), plain.numel()
    if count <= _MAX_WHOLE_VALUES:
        return plain
    stride = int(count * _GOLDEN)
    while math.gcd(stride, count) > 1:
        stride += 1
    places = torch.arange(_SAMPLE, device=plain.device).mul_(stride).add_(number * _SAMPLE * stride % count)
    return torch.take(plain, places.remainder_(count))


def differences(everyone: Sequence[Sequence[Row]]) -> list[str]:
    """Return a description of each difference between the digests; lanes without a target do not count for it."""
    told = []
    for what in ("batch", "target"):
        rows_of = {lane: [r for r in rows if r[0].startswith(what)] for lane, rows in enumerate(everyone)}
        rows_of = {lane: rows for lane, rows in rows_of.items() if rows}
        first = next(iter(rows_of), 0)
        for lane, rows in rows_of.items():
            if rows != rows_of[first]:
                told.append(_difference(first, rows_of[first], lane, rows))
                break
    return told


def _difference(one: int, ours: Sequence[Row], other: int, theirs: Sequence[Row]) -> str:
    """Return a description of the first difference between two lanes."""
    for mine, yours in zip(ours, theirs, strict=False):
        if mine[:3] != yours[:3]:
            return f"lane {one} has {_described(mine)}, lane {other} has {_described(yours)}"
        if mine != yours:
            return f"{_described(mine)} has other values on lane {other} than on lane {one}"
    return f"the {ours[0][0][:6].rstrip('[,')} has {len(ours)} values on lane {one} and {len(theirs)} on lane {other}"


def _described(row: Row) -> str:
    return f"{row[0]} ({row[1]}{f' of shape {tuple(row[2])}' if row[2] else ''})"
