"""Decoder layers: finds the layers of a language model, and makes the part of the model that one lane runs.

Each lane runs the model's own forward. The layers of earlier lanes return what the last layer of the lane before
returned, and the forward ends after the lane's last layer:

    lane 0: embedding ─ layer 0 ─ layer 1 ─┐
                                           └─► lane 1: embedding ─ received ─ received ─ layer 2 ─ layer 3 ─ head

So positions, masks and everything else that a model computes before its layers are computed on each lane, by the
model's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError, UsageError


class LaneOutput(Exception):  # noqa: N818 - not an error: it ends the forward of a lane
    """Carries the output of a lane's last layer out of the model's forward."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401 - whatever the layer returns
        super().__init__()
        self.value = value


class Received:
    """The value that a lane received: the output of the last layer of the lane before."""

    value: Any = None


class _Stand(nn.Module):
    """Stands in the place of a layer; it has the attributes of this layer, because forwards read some of them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not a submodule: the layer may belong to another lane

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


class _Earlier(_Stand):
    """The place of a layer that an earlier lane runs."""

    def __init__(self, layer: nn.Module, received: Received) -> None:
        super().__init__(layer)
        self.__dict__["_received"] = received

    def forward(self, *_: object, **__: object) -> object:
        """Return the output of the lane before."""
        return self.__dict__["_received"].value


class _Last(_Stand):
    """The place of a lane's last layer: runs it, and ends the forward."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the layer, and leave the forward with its output."""
        raise LaneOutput(self.__dict__["_layer"](*args, **kwargs))


class _Later(_Stand):
    """The place of a layer that a later lane runs."""

    def forward(self, *_: object, **__: object) -> object:
        """Refuse the call, because the forward ends before it in a model that calls its layers in order."""
        raise CaptureError("generate: the model does not call its decoder layers in their order")


def find_layers(model: Any) -> tuple[str, nn.ModuleList]:  # noqa: ANN401 - of transformers
    """Return the list of decoder layers of a language model of transformers, and its name.

    Raises:
        UsageError: if the model has no such list, or several.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module):
        raise UsageError(f"generate: {type(model).__name__} has no decoder: pass a language model of transformers")
    config: Any = getattr(model, "config", None)
    wanted = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    found = list(_outermost_lists(decoder))
    fitting = [layers for layers in found if len(layers) == wanted] or found
    if len(fitting) != 1:
        sizes = ", ".join(str(len(layers)) for layers in fitting) or "none"
        raise UsageError(
            f"generate: cannot tell which list of modules holds the decoder layers of {type(model).__name__}; "
            f"lengths of its lists: {sizes}"
        )
    (layers,) = fitting
    return next(name for name, module in model.named_modules() if module is layers), layers


def decoder_start(model: Any, device: torch.device) -> torch.Tensor:  # noqa: ANN401 - of transformers
    """Return the tokens that the decoder of an encoder-decoder model begins with."""
    config = model._prepare_generation_config(None)[0]
    model._prepare_special_tokens(config, True, device=device, batch_size=1)
    tokens, _ = model._prepare_decoder_input_ids_for_generation(
        batch_size=1, model_input_name="input_ids", model_kwargs={},
        decoder_start_token_id=config._decoder_start_token_tensor, device=device,
    )  # fmt: skip
    started: torch.Tensor = tokens[0]
    return started


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def choose_ranges(model: Any, layers: nn.ModuleList, num_lanes: int) -> list[range]:  # noqa: ANN401
    """Return the layers of each lane, so that the largest number of weights of a lane is as small as possible.

    Raises:
        UsageError: if there are more lanes than layers.
    """
    if num_lanes > len(layers):
        raise UsageError(f"lanes: {num_lanes}, but the model has {len(layers)} decoder layers, and a lane needs one")
    sizes = [sum(weight.numel() for weight in layer.parameters()) or 1 for layer in layers]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    sizes[-1] += sum(weight.numel() for weight in head.parameters()) if isinstance(head, nn.Module) else 0
    return split_evenly(sizes, num_lanes)


def split_evenly(sizes: Sequence[int], count: int) -> list[range]:
    """Cut a list into `count` ranges, none empty, whose largest sum is as small as possible.

    >>> split_evenly([1, 1, 1, 1, 1, 3], 2)
    [range(0, 4), range(4, 6)]
    """
    sums = [0, *accumulate(sizes)]
    best = {(0, 0): (0, 0)}  # (ranges, items) -> (largest sum, start of the last range)
    for part in range(1, count + 1):
        for end in range(part, len(sizes) - (count - part) + 1):
            best[part, end] = min(
                (max(best[part - 1, start][0], sums[end] - sums[start]), start)
                for start in range(part - 1, end)
                if (part - 1, start) in best
            )
    ranges, end = [], len(sizes)
    for part in range(count, 0, -1):
        start = best[part, end][1]
        ranges.append(range(start, end))
        end = start
    return ranges[::-1]


def lane_model(model: nn.Module, name: str, own: range, received: Received) -> nn.Module:
    """Return the model as one lane runs it. The lane shares the weights with the model, which does not change.

    Args:
        model: the whole model.
        name: the name of the list of its decoder layers.
        own: the layers of the lane.
        received: holds the value from the lane before while the lane runs.
    """
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    places = [_place(at, layer, own, len(layers), received) for at, layer in enumerate(layers)]
    root = _copy(model)
    _replace(root, name, nn.ModuleList(places))
    for rope in ropes_of_length(model):  # it changes with each call, and another lane may call it at the same time
        _replace(root, rope, copy.deepcopy(model.get_submodule(rope)))
    if own.start and hasattr(model, "get_input_embeddings"):
        _replace_missing_embedding(root, model)
    return root


def _place(at: int, layer: nn.Module, own: range, count: int, received: Received) -> nn.Module:
    if at < own.start:
        return _Earlier(layer, received)
    if at >= own.stop:
        return _Later(layer)
    return _Last(layer) if at == own.stop - 1 and own.stop < count else layer


def ropes_of_length(model: nn.Module) -> dict[str, int]:
    """Return the rotary embeddings whose frequencies change with the length, by name, with the length up to which not.

    Beyond this length, the tokens of a request would depend on the lengths of the others.
    """
    found = {}
    for name, module in model.named_modules():
        given = getattr(module, "rope_type", None)
        kinds = [str(kind) for kind in (given.values() if isinstance(given, dict) else (given,))]
        if any("dynamic" in kind or kind == "longrope" for kind in kinds):
            found[name] = min([*_original_lengths(module), int(getattr(module, "original_max_seq_len", 1 << 62))])
    return found


def _original_lengths(rope: Any) -> Iterator[int]:  # noqa: ANN401 - of transformers
    """Yield the lengths for which a rotary embedding was made at first."""
    given = getattr(rope.config, "rope_parameters", None) or {}
    for settings in (given, *given.values()):
        if isinstance(settings, dict) and "original_max_position_embeddings" in settings:
            yield int(settings["original_max_position_embeddings"])


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of a submodule; the modules around it are copied first."""
    *path, last = name.split(".")
    part = root
    for step in path:
        part._modules[step] = _copy(part.get_submodule(step))
        part = part.get_submodule(step)
    part._modules[last] = module


def _copy(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes, and a table of submodules of its own."""
    made = module.__class__.__new__(module.__class__)
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = dict(module._modules)
    return made


class _MissingEmbedding(nn.Module):
    """Stands for an embedding whose weights this process does not have; its output is NaN, so that no use is silent."""

    def __init__(self, embedding: nn.Module, like: torch.Tensor) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, torch.Tensor)
        self._width, self._dtype, self._device = weight.shape[-1], weight.dtype, like.device

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return NaN for each token."""
        blank = torch.full((1,), float("nan"), device=self._device, dtype=self._dtype)
        return blank.expand(*tokens.shape, self._width)


def _replace_missing_embedding(root: nn.Module, model: nn.Module) -> None:
    """On a lane that is not the first: replace the embedding of tokens if its weights are on the meta device."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_meta:
        return
    like = next((p for p in model.parameters() if not p.is_meta), None)
    if like is None:
        raise UsageError("generate: all weights of the model are on the meta device: load those of this lane first")
    name = next(name for name, module in model.named_modules() if module is embedding)
    _replace(root, name, _MissingEmbedding(embedding, like))
