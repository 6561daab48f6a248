"""Costs: what a stage takes in time and memory. Plain numbers, from a profile or from the user's head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError

__all__ = ["Costs", "StageCosts"]

_MOST = 1e30  # seconds or bytes; sums of many stay far from what a float can hold

Floats = NDArray[np.float64]
PerStage = float | Sequence[float] | Floats


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of each stage for one micro-batch: a number for all stages, or one a stage.

    >>> Costs(forward=1.0, backward=2.0).for_stages(2).weight_grad
    array([1., 1.])

    Attributes:
        forward: seconds of F.
        backward: seconds of B; by default input_grad + weight_grad.
        input_grad: seconds of I; by default half of backward.
        weight_grad: seconds of W; by default what is left of backward.
        transfer: seconds from the end of an action to when another lane sees its value. Only latency:
            for bandwidth and shared links give output_bytes and a `Cluster`.
        saved_bytes: held from F to B, or to I.
        pending_bytes: held from I to W; by default as much as saved_bytes.
        output_bytes: what a stage sends on (and gets back as a gradient).
        input_bytes: what a stage that recomputes holds instead of saved_bytes.
        recompute: seconds of RECOMPUTE; by default those of forward.
        overlapped: seconds of an overlapped forward and backward; by default their sum.
        update: seconds of U.
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
        """Return one number a stage for everything, defaults filled in.

        Raises:
            CostError: when a list is not as long as there are stages.
        """
        wrong = {
            f.name: len(v)
            for f in fields(self)
            if isinstance(v := getattr(self, f.name), tuple) and len(v) != num_stages
        }
        if wrong:
            given = ", ".join(f"{name}: {count}" for name, count in wrong.items())
            raise CostError(f"costs must be one number or one for each of {num_stages} stages; given: {given}")

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
    """Costs with one number a stage in every field; `overlapped` is NaN where it is the sum of its parts."""

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
        """Return what a kind of compute, given by its text, takes on each stage."""
        return {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "U": self.update,
            "RECOMPUTE": self.recompute,
        }[kind]


def _contradictions(costs: Costs) -> list[str]:
    """Say where a part is given as more than the whole."""
    if costs.backward is None or (costs.input_grad is not None and costs.weight_grad is not None):
        return []  # a whole backward may well be cheaper than its two parts
    for name in ("input_grad", "weight_grad"):
        part = getattr(costs, name)
        if part is not None and (np.asarray(part) > np.asarray(costs.backward)).any():
            return [f"{name}: {part} is more than backward: {costs.backward}; give both parts of it, or neither"]
    return []


def _plain(value: object) -> object:
    """Turn arrays and lists into tuples of Python numbers, so that costs stay frozen."""
    if hasattr(value, "tolist"):  # numpy's arrays and numbers, torch's tensors
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(item.tolist() if hasattr(item, "tolist") else item for item in value)
    return value


def _fault(name: str, value: object, default: object) -> str:
    """Say what is wrong with a field, or nothing; None is fine where it stands for something."""
    if value is None and default is None:
        return ""
    if isinstance(value, tuple):
        if not value:
            return f"{name}: an empty list; give one number, or one a stage"
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
