"""Parameters: the parameters and buffers of a model, each tensor once, under its first name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.model.example import Call
from penstock.model.graph import Parameter


def held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers under all of their names; a shared tensor appears several times."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def read_parameters(model: nn.Module) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Return the parameters and buffers by their first names, and the first name for each name."""
    names_of: dict[int, list[str]] = {}
    tensors = held_tensors(model)
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    parameters = {
        first: Parameter(
            name=first,
            num_bytes=tensors[first].numel() * tensors[first].element_size(),
            is_trainable=isinstance(tensors[first], nn.Parameter) and tensors[first].requires_grad,
            is_buffer=not isinstance(tensors[first], nn.Parameter),
            aliases=tuple(others),
        )
        for first, *others in names_of.values()
    }
    first_of = {name: names[0] for names in names_of.values() for name in names}
    return parameters, first_of


Place = tuple[dict[str, Any], str]  # a dict of a module, and a key in it


def tensor_places(model: nn.Module) -> dict[str, list[Place]]:
    """Return, by first name, all dicts and keys under which a model stores each parameter and each buffer."""
    _, first_of = read_parameters(model)
    places: dict[str, list[Place]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    name = first_of[f"{path}.{key}" if path else key]
                    places.setdefault(name, []).append((cast("dict[str, Any]", kind), key))
    return places


def buffer_places(model: nn.Module) -> dict[str, list[Place]]:
    """Return, by first name, the dicts and keys under which a model stores each buffer."""
    return {
        name: places
        for name, places in tensor_places(model).items()
        if not isinstance(places[0][0][places[0][1]], nn.Parameter)
    }


@contextlib.contextmanager
def replaced_tensors(places: Mapping[str, Sequence[Place]], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Temporarily put other tensors into a model, by first name; `places` are those of `tensor_places`."""
    before = [(kind, key, kind[key]) for name in tensors for kind, key in places[name]]
    try:
        for name, tensor in tensors.items():
            for kind, key in places[name]:
                kind[key] = tensor
        yield
    finally:
        for kind, key, tensor in before:
            kind[key] = tensor


def unsaved_names(model: nn.Module) -> set[str]:
    """Return the names of the non-persistent buffers."""
    return {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor in the state dict, by its other names."""
    saved = set(model.state_dict(keep_vars=True))
    return {name: first for name, first in read_parameters(model)[1].items() if name != first and name in saved}


def module_signature(module: nn.Module) -> str:
    """Return a text that is equal for modules that do the same work on inputs of the same shapes."""
    shapes = [tuple(tensor.shape) for tensor in held_tensors(module).values()]
    return f"{type(module).__qualname__}({module.extra_repr()}){shapes}"


class StandIns(Mapping[str, torch.Tensor]):
    """The tensors of a model on a device; those on meta are made when they are asked for, with random values.

    Tensors of the same shape share their memory. So a model can be measured that is larger than the device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._tensors = {name: t if t.is_meta else t.to(device) for name, t in tensors.items()}
        self._made: dict[object, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor
        form = (tensor.shape, tensor.stride(), tensor.dtype)
        if form not in self._made:
            self._made[form] = stand_in(tensor, self._device)
        return self._made[form]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; one on meta gets random values, or zeros if it holds no floating-point numbers."""
    if not tensor.is_meta or device.type == "meta":
        return tensor.to(device)
    made = torch.zeros_like(tensor, device=device)
    if made.is_floating_point() and made.element_size() > 1:
        generator = torch.Generator(device).manual_seed(made.numel())  # the global random state stays unchanged
        made.uniform_(-0.1, 0.1, generator=generator)
    return made


@contextlib.contextmanager
def new_tensors_on_meta(model: nn.Module, call: Call) -> Iterator[None]:
    """Let factory functions of a model on meta, such as `torch.rand(n)`, use meta too.

    Otherwise their results would be on the CPU, which is not the device of the lanes. Single random numbers have
    values: LayerDrop and similar code compare them to choose what to run.
    """
    device = main_device(model, call)
    if device.type != "meta":
        yield
        return
    with device, _RealNumbers():
        yield


class _RealNumbers(TorchFunctionMode):
    """Draws single numbers, such as `torch.rand([])`, on the CPU, where the model does not name a device."""

    def __torch_function__(
        self, func: Callable[..., object], _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.rand and not {"device", "size"} & kwargs.keys() and args in (((),), ([],)):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def main_device(model: nn.Module, call: Call) -> torch.device:
    """Return the device of a model; of its example, if the model has no parameters or buffers."""
    return next((tensor.device for tensor in held_tensors(model).values()), call.tensors[0].device)
