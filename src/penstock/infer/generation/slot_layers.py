"""Slot layers: the keys and values of one decoder layer, in memory that is allocated once for all its tokens.

They are layers of transformers' own cache. The cache of transformers copies all keys and values for each new token; a
slot layer writes the new ones behind the old ones. The keys that a model gets are the same.

A window keeps only the last tokens. When its memory is full, the tokens that are still visible move to its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from penstock.errors import UsageError

SPARE_TOKENS = 64  # the additional tokens that the memory of a window holds, so that it rarely moves

Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]  # the keys and the values of each row: heads × tokens × width


def kept_tokens(num_tokens: int, window: int) -> int:
    """Return how many of the last tokens a layer keeps; a window of 0 keeps all.

    >>> kept_tokens(100, 0), kept_tokens(100, 8), kept_tokens(3, 8)
    (100, 7, 3)
    """
    return num_tokens if window == 0 else min(num_tokens, window - 1)


def allocated_tokens(num_tokens: int, window: int) -> int:
    """Return for how many tokens a row has memory, if it will have `num_tokens` in total."""
    return num_tokens if window == 0 else min(num_tokens, window - 1 + SPARE_TOKENS)


class Slots:
    """Memory for keys and values: rows × heads × tokens × width."""

    def __init__(self, like: tuple[torch.Tensor, torch.Tensor], num_rows: int, num_tokens: int) -> None:
        self.memory = [
            torch.zeros((num_rows, part.shape[-3], num_tokens, part.shape[-1]), dtype=part.dtype, device=part.device)
            for part in like
        ]
        self.num_tokens = num_tokens
        self.start = self.stop = 0

    def views(self, start: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values from `start` on."""
        first = self.start if start is None else start
        keys, values = (part[:, :, first : self.stop] for part in self.memory)
        return keys, values

    def append(self, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values behind those that are there."""
        stop = self.stop + new[0].shape[-2]
        for part, more in zip(self.memory, new, strict=True):
            part[:, :, self.stop : stop] = more
        self.stop = stop

    def move_to_start(self) -> None:
        """Move the visible tokens to the start of the memory."""
        kept = [part.clone() for part in self.views()]
        self.start = self.stop = 0
        self.append((kept[0], kept[1]))


class SlotLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # of transformers
    """A layer of the cache without a window."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots, self.is_initialized = slots, True
        self.keys, self.values = slots.views()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Add keys and values, and return all."""
        self.slots.append((key_states, value_states))
        self.keys, self.values = self.slots.views()
        return self.keys, self.values


class SlotWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # of transformers
    """A layer of the cache that keeps a window of the last tokens."""

    def __init__(self, slots: Slots, window: int, num_tokens: int) -> None:
        super().__init__(window)
        self.slots, self.is_initialized, self.cumulative_length = slots, True, num_tokens
        self.keys, self.values = slots.views()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Add keys and values, and return those that the new tokens see."""
        slots = self.slots
        if slots.stop + key_states.shape[-2] > slots.num_tokens:
            slots.move_to_start()
        slots.append((key_states, value_states))
        self.cumulative_length += key_states.shape[-2]
        visible = slots.views()
        slots.start = max(slots.start, slots.stop - self.sliding_window + 1)
        self.keys, self.values = slots.views()
        return visible


class PromptWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # of transformers
    """A layer of the cache for a prompt; it frees the tokens of the prompt that no later token sees."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Add keys and values, and return all."""
        visible = super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.keys.clone(), self.values.clone()
        return visible


def window_of(layer: object) -> int:
    """Return the window of a layer of the cache; 0 if it has none."""
    return int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0


def slot_layer(rows: Rows, window: int, num_tokens: int, capacity: int) -> SlotLayer | SlotWindowLayer:
    """Return a layer with these rows, padded on the left to `num_tokens` tokens.

    Args:
        rows: the keys and values of each row; at most the last `window - 1` tokens of each.
        window: the window of the layer; 0 if it has none.
        num_tokens: the number of tokens of the longest row.
        capacity: the largest number of tokens that a row will have.
    """
    width = kept_tokens(num_tokens, window)
    slots = Slots(rows[0], len(rows), max(width + 1, allocated_tokens(capacity, window)))
    slots.stop = width
    for at, row in enumerate(rows):
        for memory, part in zip(slots.memory, row, strict=True):
            if part.shape[-2]:
                memory[at, :, width - part.shape[-2] : width] = part
    return SlotWindowLayer(slots, window, num_tokens) if window else SlotLayer(slots)


def new_cache(config: Any, own: range) -> DynamicCache:  # noqa: ANN401 - a config of transformers
    """Return an empty cache for a lane.

    The layers of other lanes are aliases of a layer of this lane, of the same kind if there is one. A model asks its
    cache for the number of tokens, and asks about any layer.
    """
    cache = DynamicCache(config=config)
    cache.layers = [PromptWindowLayer(window_of(layer)) if window_of(layer) else layer for layer in cache.layers]
    return alias_foreign(cache, own)


def check_layers(config: Any, num_layers: int) -> None:  # noqa: ANN401 - a config of transformers
    """Raise a UsageError if a layer of the model's cache is neither full attention nor a sliding window."""
    cache = DynamicCache(config=config)
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _KINDS})
    if odd:
        raise UsageError(
            f"generate: the model's cache has layers of these kinds: {', '.join(odd)}; only DynamicLayer and "
            "DynamicSlidingWindowLayer can be generated over lanes. Use model.generate"
        )
    if len(cache.layers) < num_layers:
        raise UsageError("generate: some decoder layers of this model share keys and values, which cannot be cut")


_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)


def alias_foreign(cache: DynamicCache, own: range) -> DynamicCache:
    """Replace the layers of other lanes by layers of this lane, and return the cache."""
    mine = {at: cache.layers[at] for at in own}
    for at, layer in enumerate(cache.layers):
        if at not in own:
            alike = (other for other in mine.values() if window_of(other) == window_of(layer))
            cache.layers[at] = next(alike, mine[own.start])
    return cache
