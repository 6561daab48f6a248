"""Model parts: the parts of a model, to detect whether one was replaced."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModelParts:
    """The modules, parameters and buffers of a model at this moment.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: list[tuple[dict[str, Any], str, Any]] = [
            (place, name, part)
            for module in model.modules()
            for place in (module._modules, module._parameters, module._buffers)
            for name, part in place.items()
        ]

    def is_unchanged(self) -> bool:
        """Return whether no part was replaced; changes in place do not count."""
        return all(place.get(name) is part for place, name, part in self._found)
