"""Control notes: the messages between stages that make them take the same branches of the model."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Notes:
    """The observations that later stages need to take the same branches.

    Attributes:
        reads: the data that was read into Python, by the frame and the number of the read in it.
        shapes: for each module call, by path and ordinal, a description of each result: ["in", i] for the i-th tensor
            argument, or shape, stride and dtype of a new tensor.
        live: the marks of the tensors that are sent with the notes.
        python_random: the states of Python's and numpy's random numbers at the start of the forward, if it draws any.
    """

    reads: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, list[list[Any]]] = field(default_factory=dict)
    live: list[list[list[Any]]] = field(default_factory=list)
    python_random: list[Any] | None = None

    def to_tensor(self) -> torch.Tensor:
        """Return the notes as a tensor of bytes, which can be sent as any other value."""
        text = json.dumps([self.reads, self.shapes, self.live, self.python_random], default=_encode)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Notes:
        """Return the notes from the tensor that `to_tensor` made."""
        reads, shapes, live, state = json.loads(bytes(tensor.cpu().numpy().tobytes()))
        return cls({place: _decode(item) for place, item in reads.items()}, shapes, live, state)

    def note_random(self) -> None:
        """Save the states of Python's and numpy's random numbers."""
        version, state, gauss = random.getstate()
        name, keys, *rest = np.random.get_state(legacy=True)
        self.python_random = [version, list(state), gauss, [name, np.asarray(keys).tolist(), *rest]]

    def set_random(self) -> None:
        """Restore the saved states, if there are any, so that the same numbers are drawn again."""
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
