"""Initialisation: give values to tensors that are in no file, by the model's own functions.

A process draws the numbers of all such tensors, in the order of the modules, and keeps those of its own stages. So
the values do not depend on the number of lanes. Tensors of other stages share one scratch memory, which is as large as
the largest of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.loading.weight_recipes import is_of_transformers
from penstock.model.parameters import Place, replaced_tensors, tensor_places

_MARK = "_is_hf_initialized"  # transformers leaves tensors and modules with this attribute unchanged
_METHODS = ("reset_parameters", "_reset_parameters")


def initialise(model: nn.Module, lacking: Collection[str], own: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors of a model that are in no file.

    Args:
        model: the model; its other tensors may be on meta. It is left unchanged.
        lacking: the first names of the tensors to fill.
        own: the tensors of this process by first name, on the CPU; other tensors are drawn and dropped.

    Raises:
        UsageError: if the model has no function that fills one of them.
    """
    if not lacking:
        return
    slots = tensor_places(model)
    real = _real_tensors({name: slots[name][0] for name in lacking}, own)
    versions = {name: tensor._version for name, tensor in real.items()}
    with replaced_tensors(slots, real), torch.no_grad():
        if is_of_transformers(model):
            _run_transformers(model, real)
        else:
            _run_plain(model, {name: slots[name] for name in lacking})
        untouched = [
            name for name in real if real[name]._version == versions[name] and _current(slots[name][0]) is real[name]
        ]
        for name in set(lacking) - set(untouched):
            found = _current(slots[name][0])
            if name in own and found.data_ptr() != own[name].data_ptr():  # the model has made a new tensor
                own[name].copy_(found)
    if untouched:
        raise UsageError(_without_values(model, untouched))


def _without_values(model: nn.Module, names: Collection[str]) -> str:
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    some = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    fixes = (
        "build the model in `with penstock.empty_weights():`, which keeps the values of buffers"
        if buffers & set(names)
        else "add them to the file, or give their module a method reset_parameters()"
    )
    return f"weights: no file holds {some}, and the model has no function that initialises them; {fixes}"


def _current(slot: Place) -> torch.Tensor:
    kind, key = slot
    found: torch.Tensor = kind[key]
    return found


def _real_tensors(places: Mapping[str, Place], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a tensor with memory for each name: its own one, or a part of the scratch memory."""
    shapes = {name: _current(slot) for name, slot in places.items()}
    foreign = [tensor.numel() * tensor.element_size() for name, tensor in shapes.items() if name not in own]
    scratch = torch.empty(max(foreign, default=0), dtype=torch.uint8)
    real: dict[str, torch.Tensor] = {}
    for name, old in shapes.items():
        tensor = own[name].detach() if name in own else _part_of(scratch, old)
        real[name] = nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    return real


def _part_of(scratch: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return scratch[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _run_transformers(model: nn.Module, real: Mapping[str, torch.Tensor]) -> None:
    """Let transformers initialise all tensors that are not marked, as `from_pretrained` does."""
    marked: list[Any] = []
    unmarked = {id(tensor) for tensor in real.values()}
    modules = [(module, vars(module).pop(_MARK)) for module in model.modules() if _MARK in vars(module)]
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in unmarked and not hasattr(tensor, _MARK):
                setattr(tensor, _MARK, True)
                marked.append(tensor)
        cast("Any", model).initialize_weights()
    finally:
        for tensor in marked:
            delattr(tensor, _MARK)
        for module in model.modules():
            vars(module).pop(_MARK, None)
        for module, mark in modules:
            setattr(module, _MARK, mark)


def _run_plain(model: nn.Module, lacking: Mapping[str, list[Place]]) -> None:
    """Call the method that initialises a module, children first, for each module that lacks a tensor."""
    wanted = {(id(kind), key) for slots in lacking.values() for kind, key in slots}
    for module in _children_first(model, set()):
        kinds = (module._parameters, module._buffers)
        if not any((id(kind), key) in wanted for kind in kinds for key in kind):
            continue
        method = next((getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None)
        if method is None:
            continue
        # the method fills all tensors of the module; those that are in a file must keep their values
        others = [
            (kind, key, tensor)
            for kind in kinds
            for key, tensor in kind.items()
            if tensor is not None and (id(kind), key) not in wanted
        ]
        try:
            for kind, key, tensor in others:
                made = torch.empty_like(tensor, device="cpu")
                kind[key] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made  # type: ignore[assignment]
            method()
        finally:
            for kind, key, tensor in others:
                kind[key] = tensor  # type: ignore[assignment]


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module
