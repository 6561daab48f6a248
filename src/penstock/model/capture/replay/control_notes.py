"""Notes: what a stage tells the next one of the way the forward took: what was read, the shapes, what lives."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["Notes"]


@dataclass
class Notes:
    """What later stages must know to take the same way.

    Attributes:
        reads: what was read into Python, by the frame that read it and the how-manieth time.
        shapes: for each call of a module, by path and ordinal, what came out: ["in", i] for the i-th tensor it got, or
            shape, stride and dtype.
        live: the marks of the tensors that are sent along.
        python_random: the states of Python's and numpy's random numbers when the forward began, if it draws any.
    """

    reads: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, list[list[Any]]] = field(default_factory=dict)
    live: list[list[list[Any]]] = field(default_factory=list)
    python_random: list[Any] | None = None

    def to_tensor(self) -> torch.Tensor:
        """Return the notes as bytes, to be sent as any other value."""
        text = json.dumps([self.reads, self.shapes, self.live, self.python_random], default=_encode)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Notes:
        """Read them."""
        reads, shapes, live, state = json.loads(bytes(tensor.cpu().numpy().tobytes()))
        return cls({place: _decode(item) for place, item in reads.items()}, shapes, live, state)

    def note_random(self) -> None:
        """Remember the state of Python's own random numbers."""
        version, state, gauss = random.getstate()
        name, keys, *rest = np.random.get_state(legacy=True)
        self.python_random = [version, list(state), gauss, [name, np.asarray(keys).tolist(), *rest]]

    def set_random(self) -> None:
        """Draw the same numbers again, if the forward draws any."""
        if self.python_random is not None:
            version, state, gauss, (name, keys, *rest) = self.python_random
            random.setstate((version, tuple(state), gauss))
            np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _encode(item: object) -> object:
    if isinstance(item, np.ndarray):
        return {"array": item.tolist(), "dtype": str(item.dtype)}
    if isinstance(item, complex):
        return {"complex": [item.real, item.imag]}
    if isinstance(item, np.generic):
        return item.item()
    raise TypeError(f"a value of type {type(item).__name__} cannot be sent to another stage")


def _decode(item: Any) -> Any:  # noqa: ANN401
    if isinstance(item, dict) and "array" in item:
        return np.array(item["array"], dtype=item["dtype"])
    if isinstance(item, dict) and "complex" in item:
        return complex(*item["complex"])
    return item
