"""Actions: a kind, a stage and a micro-batch, with one text form and one integer form."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError


class Kind(StrEnum):
    """The type of an action: its text in the text form of actions, and `words`, the same in plain words."""

    _value_: str
    words: str

    def __new__(cls, text: str, words: str = "") -> Self:  # noqa: D102
        kind = str.__new__(cls, text)
        kind._value_, kind.words = text, words
        return kind

    F = "F", "forward"
    B = "B", "full backward"  # both gradients at once
    I = "I", "input gradient"
    W = "W", "weight gradient"
    U = "U", "update"  # the optimizer step of one stage (asynchronous schedules only)
    SEND_F = "SEND_F", "send of an activation"
    RECV_F = "RECV_F", "receive of an activation"
    SEND_B = "SEND_B", "send of a gradient"
    RECV_B = "RECV_B", "receive of a gradient"
    RECOMPUTE = "RECOMPUTE", "recompute"
    OFFLOAD = "OFFLOAD", "offload to host memory"
    FETCH = "FETCH", "fetch from host memory"


KINDS: tuple[Kind, ...] = tuple(Kind)
KIND_INDEX: dict[Kind, int] = {kind: index for index, kind in enumerate(KINDS)}

# An action as one int64: the kind in the top byte, then 24 bits of stage and 32 bits of micro-batch (one bit unused).
# Lanes of millions of actions stay small, and their readers work on whole arrays.
STAGE_BITS, MB_BITS = 24, 32
MAX_STAGES, MAX_MBS = 1 << STAGE_BITS, 1 << (MB_BITS - 1)  # a micro-batch fits a signed 32-bit number
_STAGE_MASK, _MB_MASK = MAX_STAGES - 1, MAX_MBS - 1

_PATTERN = re.compile(r"([0-9]{1,12})(" + "|".join(sorted(KINDS, key=len, reverse=True)) + r")([0-9]{1,12})")

Codes = NDArray[np.int64]
Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Positions = NDArray[np.int64]  # in a table, such as that of all actions


class Action(NamedTuple):
    """One action of a lane: a kind, for one stage and one micro-batch.

    >>> str(Action(Kind.F, 2, 0)), Action.parse("3I7")
    ('2F0', Action(kind=<Kind.I: 'I'>, stage=3, mb=7))
    """

    kind: Kind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.mb}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action's text form.

        Raises:
            ScheduleError: if the text is not a stage, a kind and a micro-batch.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            kinds = " ".join(kind.value for kind in KINDS)
            raise ScheduleError(
                f"{text.strip()[:40]!r} is not an action: write stage, kind and micro-batch, as in 2F0 (kinds: {kinds})"
            )
        stage, mb = int(match[1]), int(match[3])
        if stage >= MAX_STAGES or mb >= MAX_MBS:
            raise ScheduleError(
                f"{text.strip()[:40]!r} is out of range: use stages below 2^24, micro-batches below 2^31"
            )
        return cls(Kind(match[2]), stage, mb)


def encode(kind: Kind, stage: int | NDArray[np.integer], mb: int | NDArray[np.integer]) -> Codes:
    """Turn actions of one kind into their integer form."""
    return np.int64(KIND_INDEX[kind] << (STAGE_BITS + MB_BITS)) | (np.int64(stage) << MB_BITS) | np.int64(mb)  # type: ignore[return-value]


def decode(codes: Codes) -> tuple[NDArray[np.int8], Ints, Ints]:
    """Split integer actions into kind indices, stages and micro-batches."""
    kinds = (codes >> (STAGE_BITS + MB_BITS)).astype(np.int8)
    stages = ((codes >> MB_BITS) & _STAGE_MASK).astype(np.int32)
    return kinds, stages, (codes & _MB_MASK).astype(np.int32)


def _action(code: int) -> Action:
    return Action(KINDS[code >> (STAGE_BITS + MB_BITS)], (code >> MB_BITS) & _STAGE_MASK, code & _MB_MASK)


def _checked(item: Action | str) -> Action:
    """Return an action whose numbers fit, from an action or its text."""
    if isinstance(item, str):
        return Action.parse(item)
    try:
        kind, stage, mb = Kind(item[0]), operator.index(item[1]), operator.index(item[2])
    except (TypeError, ValueError, IndexError, KeyError):
        raise ScheduleError(f"{item!r} is not an action: pass a kind, a stage and a micro-batch") from None
    if not (0 <= stage < MAX_STAGES and 0 <= mb < MAX_MBS):
        raise ScheduleError(f"{item!r} is out of range: stages are in 0..2^24 - 1, micro-batches in 0..2^31 - 1")
    return Action(kind, stage, mb)


class Lane(Sequence[Action]):
    """One ordered list of actions: stored as integers, read as actions, and equal to a tuple of the same actions.

    >>> Lane.of("0F0 0F1 0B0")[1:]
    Lane('0F1 0B0')
    """

    __slots__ = ("codes",)

    codes: Codes

    def __init__(self, codes: Codes) -> None:
        frozen = np.ascontiguousarray(codes, dtype=np.int64)
        if frozen is codes or frozen.base is not None:
            frozen = frozen.copy() if frozen.flags.writeable else frozen
        frozen.flags.writeable = False
        self.codes = frozen

    @classmethod
    def of(cls, actions: Lane | str | Iterable[Action | str]) -> Lane:
        """Make a lane from actions, from their texts, or from one text with spaces between the actions."""
        if isinstance(actions, Lane):
            return actions
        items = actions.split() if isinstance(actions, str) else actions
        return cls(np.array([int(encode(*_checked(item))) for item in items], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Lane: ...
    def __getitem__(self, index: int | slice) -> Action | Lane:
        if isinstance(index, slice):
            return Lane(self.codes[index].copy())
        return _action(int(self.codes[index]))

    def __iter__(self) -> Iterator[Action]:
        return map(_action, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Lane):
            return np.array_equal(self.codes, other.codes)
        if isinstance(other, (tuple, list)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))  # a lane equals the tuple of its actions, so their hashes must be equal

    def __reduce__(self) -> tuple[type[Lane], tuple[Codes]]:
        return Lane, (self.codes,)  # the constructor makes the array read-only again

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def __repr__(self) -> str:
        return f"Lane({str(self)!r})"
