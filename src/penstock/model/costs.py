"""Costs: the time and memory that each stage takes, as plain numbers from a profile or from the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError

_MOST = 1e30  # seconds or bytes; sums of many such numbers stay far below the float limit

Floats = NDArray[np.float64]
PerStage = float | Sequence[float] | Floats


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of each stage for one micro-batch: one number for all stages, or one number per stage.

    >>> Costs(forward=1.0, backward=2.0).for_stages(2).weight_grad
    array([1., 1.])

    Attributes:
        forward: the seconds of F.
        backward: the seconds of B; by default input_grad + weight_grad.
        input_grad: the seconds of I; by default half of backward.
        weight_grad: the seconds of W; by default backward - input_grad.
        transfer: the seconds from the end of an action until another lane has its value. This is latency only: for
            bandwidth and shared links, give output_bytes and a `Cluster`.
        saved_bytes: the bytes held from F to B, or from F to I.
        pending_bytes: the bytes held from I to W; by default equal to saved_bytes.
        output_bytes: the bytes that a stage sends to the next one (and receives back as a gradient).
        input_bytes: the bytes that a recomputing stage holds instead of saved_bytes.
        recompute: the seconds of RECOMPUTE; by default those of forward.
        overlapped: the seconds of an overlapped forward and backward; by default their sum.
        update: the seconds of U.
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input_grad: PerStage | None = None
    weight_grad: PerStage | None = None
    transfer: PerStage = 0.0
    saved_bytes: PerStage | None = None
    pending_bytes: PerStage | None = None
    output_bytes: PerStage = 0.0
    input_bytes: PerStage = 0.0
    recompute: PerStage | None = None
    overlapped: PerStage | None = None
    update: PerStage = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _plain(getattr(self, f.name)))
        faults = [fault for f in fields(self) if (fault := _fault(f.name, getattr(self, f.name), f.default))]
        lengths = {f.name: len(v) for f in fields(self) if isinstance(v := getattr(self, f.name), tuple)}
        if len(set(lengths.values())) > 1:
            faults.append("lists of different lengths: " + ", ".join(f"{name}: {n}" for name, n in lengths.items()))
        faults += [] if faults else _contradictions(self)
        if faults:
            raise CostError("; ".join(faults))

    def for_stages(self, num_stages: int) -> StageCosts:
        """Return the costs with one number per stage in every field, and with all defaults filled in.

        Raises:
            CostError: if the length of a list differs from the number of stages.
        """
        wrong = {
            f.name: len(v)
            for f in fields(self)
            if isinstance(v := getattr(self, f.name), tuple) and len(v) != num_stages
        }
        if wrong:
            given = ", ".join(f"{name}: {count}" for name, count in wrong.items())
            raise CostError(f"costs must be one number, or one per stage ({num_stages} stages); given: {given}")

        def column(value: PerStage | None, default: Floats | float) -> Floats:
            chosen = default if value is None else np.asarray(value, dtype=np.float64)
            return np.array(np.broadcast_to(chosen, num_stages), dtype=np.float64)

        forward = column(self.forward, 0.0)
        whole = column(self.backward, 2 * forward)
        if self.backward is None and (self.input_grad is not None or self.weight_grad is not None):
            half = column(self.input_grad if self.weight_grad is None else self.weight_grad, 0.0)
            input_grad, weight_grad = column(self.input_grad, half), column(self.weight_grad, half)
            whole = input_grad + weight_grad
        elif self.weight_grad is not None and self.input_grad is None:
            weight_grad = column(self.weight_grad, 0.0)
            input_grad = np.maximum(whole - weight_grad, 0.0)
        else:
            input_grad = column(self.input_grad, whole / 2)
            weight_grad = column(self.weight_grad, np.maximum(whole - input_grad, 0.0))
        saved = column(self.saved_bytes, 0.0)
        return StageCosts(
            forward=forward,
            backward=whole,
            input_grad=input_grad,
            weight_grad=weight_grad,
            transfer=column(self.transfer, 0.0),
            saved_bytes=saved,
            pending_bytes=column(self.pending_bytes, saved),
            output_bytes=column(self.output_bytes, 0.0),
            input_bytes=column(self.input_bytes, 0.0),
            recompute=column(self.recompute, forward),
            overlapped=column(self.overlapped, np.nan),
            update=column(self.update, 0.0),
        )


@dataclass(frozen=True)
class StageCosts:
    """Costs with one number per stage in every field; in `overlapped`, NaN stands for the sum of the two parts."""

    forward: Floats
    backward: Floats
    input_grad: Floats
    weight_grad: Floats
    transfer: Floats
    saved_bytes: Floats
    pending_bytes: Floats
    output_bytes: Floats
    input_bytes: Floats
    recompute: Floats
    overlapped: Floats
    update: Floats

    def seconds_of(self, kind: str) -> Floats:
        """Return the seconds that a kind of compute, such as "F", takes on each stage."""
        return {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "U": self.update,
            "RECOMPUTE": self.recompute,
        }[kind]


def _contradictions(costs: Costs) -> list[str]:
    """Return a fault if a part of the backward takes longer than the whole backward."""
    if costs.backward is None or (costs.input_grad is not None and costs.weight_grad is not None):
        return []  # a full backward may be cheaper than its two separate parts
    for name in ("input_grad", "weight_grad"):
        part = getattr(costs, name)
        if part is not None and (np.asarray(part) > np.asarray(costs.backward)).any():
            return [f"{name}: {part} is more than backward: {costs.backward}; give both parts, or neither"]
    return []


def _plain(value: object) -> object:
    """Convert arrays and lists to tuples of Python numbers, so that costs are immutable."""
    if hasattr(value, "tolist"):  # numpy arrays and numbers, torch tensors
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(item.tolist() if hasattr(item, "tolist") else item for item in value)
    return value


def _fault(name: str, value: object, default: object) -> str:
    """Return the fault of a field, or an empty string; None is allowed in fields whose default is None."""
    if value is None and default is None:
        return ""
    if isinstance(value, tuple):
        if not value:
            return f"{name}: an empty list; pass one number, or one per stage"
        return next((fault for i, number in enumerate(value) if (fault := _number_fault(f"{name}[{i}]", number))), "")
    return _number_fault(name, value)


def _number_fault(place: str, number: object) -> str:
    if isinstance(number, bool) or not isinstance(number, (int, float, np.number)):
        return f"{place}: {number!r} is not a number"
    if not 0 <= number <= _MOST:
        return f"{place}: {_short(number)} must be finite and not negative"
    return ""


def _short(number: object) -> str:
    text = str(number)
    return text if len(text) < 20 else f"{text[:17]}..."
