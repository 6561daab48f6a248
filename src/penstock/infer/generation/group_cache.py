"""Group cache: the keys and values of the requests that a lane runs in one batch.

The rows of a batch end at the same column; shorter rows are padded on the left, and a mask hides the padding. So a
request can join or leave between two tokens: the cache is then made again, from the rows that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from penstock.infer.generation.slot_layers import Rows, alias_foreign, kept_tokens, new_cache, slot_layer, window_of


@dataclass
class GroupCache:
    """The cache of a batch on one lane.

    Args:
        requests: the numbers of the requests, in the order of the rows.
        lengths: the number of tokens of each request in the cache.
        cache: the cache that the model gets.
        own: the decoder layers of the lane.
        capacity: the largest number of tokens that a row has memory for.
        extras: the encoder's output, for a model that has an encoder.
    """

    requests: tuple[int, ...]
    lengths: list[int]
    cache: Cache
    own: range
    capacity: int
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> list[Any]:
        """The layers of this lane."""
        cache = self.cache
        plain = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        return [plain.layers[at] for at in self.own]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.lengths)

    def row(self, request: int, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - of transformers
        """Return the keys and values of a request in a layer, without padding."""
        at = self.requests.index(request)
        count = kept_tokens(self.lengths[at], window_of(layer))
        first = layer.keys.shape[-2] - count
        return layer.keys[at, :, first:], layer.values[at, :, first:]

    def length(self, request: int) -> int:
        """Return the number of tokens of a request in the cache."""
        return self.lengths[self.requests.index(request)]

    def positions(self) -> torch.Tensor:
        """Return the position of the next token of each row: rows × 1."""
        return torch.tensor([[length] for length in self.lengths])

    def mask(self) -> torch.Tensor | None:
        """Return the mask for the next token: rows × tokens; None if no row is padded."""
        longest = self.num_tokens
        if all(length == longest for length in self.lengths):
            return None
        columns = torch.arange(longest + 1)
        return (columns >= longest - torch.tensor(self.lengths)[:, None]).long()

    def advance(self, num_tokens: int) -> None:
        """Count tokens that were added to each row."""
        self.lengths = [length + num_tokens for length in self.lengths]

    def free(self, at: int) -> None:
        """Free the memory of a layer."""
        layer = self.layers[at - self.own.start]
        layer.slots = layer.keys = layer.values = None

    def num_bytes(self) -> int:
        """Return the bytes of the keys and values of this lane."""
        caches = [self.cache]
        if isinstance(self.cache, EncoderDecoderCache):
            caches = [self.cache.self_attention_cache, self.cache.cross_attention_cache]
        layers = [cache.layers[at] for cache in caches for at in self.own if at < len(cache.layers)]
        return sum(_memory_of(layer) for layer in layers)


def _memory_of(layer: Any) -> int:  # noqa: ANN401 - a layer of transformers
    slots = getattr(layer, "slots", None)
    parts = slots.memory if slots is not None else [layer.keys, layer.values]
    return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


def empty_cache(request: int, config: Any, own: range, *, has_encoder: bool) -> GroupCache:  # noqa: ANN401
    """Return an empty cache for the prompt of one request."""
    cache: Cache = new_cache(config, own)
    if has_encoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    return GroupCache((request,), [0], cache, own, 0)


def joined(
    sources: Sequence[tuple[int, GroupCache]],
    config: Any,  # noqa: ANN401 - of transformers
    capacity: int,
    *,
    left: Sequence[GroupCache],
) -> GroupCache:
    """Return one cache for requests that are in several caches.

    Args:
        sources: each request with the cache that holds it.
        config: the config of the model's decoder.
        capacity: the largest number of tokens that a row will have.
        left: caches that are not needed any more; they are freed layer by layer.
    """
    first = sources[0][1]
    if isinstance(first.cache, EncoderDecoderCache):  # such a request is a group of its own
        return first
    own, cache = first.own, DynamicCache(config=config)
    lengths = [source.length(request) for request, source in sources]
    for at, layer in zip(own, first.layers, strict=True):
        rows: Rows = [source.row(request, source.layers[at - own.start]) for request, source in sources]
        cache.layers[at] = slot_layer(rows, window_of(layer), max(lengths), capacity)
        del rows
        for old in left:
            old.free(at)
    alias_foreign(cache, own)
    return GroupCache(tuple(request for request, _ in sources), lengths, cache, own, capacity)
