"""Makeup: what a model is made of, to see whether something was put in the place of a part since."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Makeup"]


class Makeup:
    """The modules, parameters and buffers of a model, as they are when this is made.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: list[tuple[dict[str, Any], str, Any]] = [
            (place, name, part)
            for module in model.modules()
            for place in (module._modules, module._parameters, module._buffers)
            for name, part in place.items()
        ]

    def is_there(self) -> bool:
        """Return whether each part is where it was; a change in place is none."""
        return all(place.get(name) is part for place, name, part in self._found)
