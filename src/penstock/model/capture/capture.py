"""Capture: turn any model and an example into a Graph that can be cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from penstock.errors import CaptureError, PenstockError, UsageError, error_in_short, nearest
from penstock.model.capture.direct import Direct, sequence_of
from penstock.model.capture.exported import Exported
from penstock.model.capture.replay.module_shell import hooks_in
from penstock.model.capture.replayed import Replayed
from penstock.model.example import Call, read_example
from penstock.model.parameters import held_tensors, main_device
from penstock.model.source import line_of

Captured = Direct | Exported | Replayed  # a model captured by one of the capture paths
PATHS = ("auto", "direct", "export", "replay")


def capture(
    model: nn.Module | Sequence[nn.Module],
    example: object,
    *,
    training: bool | None = None,
    path: str = "auto",
    num_stages: int | None = None,
) -> Captured:
    """Capture a model: sequences directly, other models by torch.export if it keeps their behaviour, else by replay.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> captured = capture(model, torch.zeros(3, 4))
    >>> captured.path, [str(captured.graph.values[v]) for v in captured.graph.crossing(2)]
    ('direct', ['float32[batch, 8]'])

    Args:
        model: any module, unchanged, in any mode and on any device, also on meta; or a list of stage modules. Each
            stage module gets the result of the one before (a tuple becomes several arguments).
        example: the arguments: a tensor, a tuple of arguments or a dict of keyword arguments.
        training: whether to capture training or evaluation; by default the current mode of the model. The other mode
            is captured when a stage is first put into it.
        path: "direct", "export" or "replay" to use this path; "auto" uses the first one that works.
        num_stages: the number of stages. A sequence with fewer modules than this is not captured directly.

    Raises:
        CaptureError: if no path supports the model; gives the reason of each path, and what to do.
        UsageError: if an argument is wrong.
    """
    if path not in PATHS:
        raise UsageError(f"capture_path: {path!r} is not one of {', '.join(PATHS)}.{nearest(path, PATHS)}")
    if not isinstance(model, nn.Module):
        return _stage_modules(model, example, training)
    model = plain_module(model)
    call = read_example(example, model)
    mode = model.training if training is None else training
    sequence = sequence_of(model)
    if sequence is not None and path in ("auto", "direct") and len(sequence) >= (num_stages or 2):
        _refuse_plain_tensors_on_meta(model)
        return _direct(model, call, sequence, training=mode)
    if path == "direct":
        raise CaptureError("the model is not a sequence of modules, so capture_path='direct' cannot capture it")
    refusal = hooks_in(model) if path in ("auto", "export") else ""
    if refusal and path == "export":
        raise CaptureError(f"torch.export drops {refusal}: pass capture_path='replay'")
    if path == "export" or (path == "auto" and not refusal):
        try:
            return Exported(model, call, training=mode)
        except CaptureError as error:
            if path == "export":
                raise
            refusal = str(error)
    _refuse_plain_tensors_on_meta(model)  # a trace sees whether forward uses them; a replay would not
    try:
        return Replayed(model, call, training=mode, reason=refusal or "requested")
    except PenstockError as error:
        raise CaptureError(_both(refusal, str(error))) from error
    except Exception as error:
        told = _both(refusal, f"{error_in_short(error)} {line_of(error)}")
        if main_device(model, call).type == "meta":
            told += ". On meta no tensor has values; if forward reads some, build the model with its weights instead"
        raise CaptureError(told) from error


def _refuse_plain_tensors_on_meta(model: nn.Module) -> None:
    """Refuse a model with tensors on meta that are neither parameters nor buffers: nothing gives them values."""
    held = {id(tensor) for tensor in held_tensors(model).values()}
    found = [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in held
    ]
    if found:
        raise CaptureError(
            f"{', '.join(found[:3])}: a tensor on meta that is neither a parameter nor a buffer, so nothing can give it"
            " values. Build the model in `with penstock.empty_weights():`, which keeps them, or register it as a buffer"
        )


def _stage_modules(modules: Sequence[nn.Module], example: object, training: bool | None) -> Captured:
    if isinstance(modules, type):
        raise UsageError(f"model: {modules.__name__} is a class; pass a module: {modules.__name__}(...)")
    if not isinstance(modules, (list, tuple)):
        raise UsageError(f"model: pass an nn.Module, or a list of stage modules, not {modules!r:.60}")
    wrong = [f"{module!r:.60}" for module in modules if not isinstance(module, nn.Module)]
    if wrong or not modules:
        raise UsageError(
            f"model: pass an nn.Module, or a list of stage modules; not a module: {', '.join(wrong) or 'none given'}"
        )
    model = nn.ModuleList(modules)
    mode = modules[0].training if training is None else training
    model.training = mode
    paths = [str(index) for index in range(len(modules))]
    return _direct(model, read_example(example, modules[0]), paths, training=mode, spreads=True)


def _direct(model: nn.Module, call: Call, paths: list[str], *, training: bool, spreads: bool = False) -> Captured:
    try:
        return Direct(model, call, paths, training=training, spreads=spreads)
    except PenstockError:
        raise
    except Exception as error:
        raise CaptureError(_both("", f"{error_in_short(error)} {line_of(error)}", "direct")) from error


def _both(first: str, second: str, path: str = "replay") -> str:
    stopped = f"export: {first}; " if first else ""
    second = second.strip()
    return (
        f"no capture path supports this model: {stopped}{path}: {second}. Call the model on the example once without"
        " Penstock. If that works, pass a list of stage modules, or move the code that stops the capture into a module"
        " of its own"
    )


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, whose compiled code cannot be cut."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model
