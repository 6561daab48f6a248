"""Capture: turn any model and an example into a Graph that can be cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.errors import CaptureError, PenstockError, UsageError, error_in_short, nearest
from penstock.model.capture.direct import Direct, sequence_of
from penstock.model.capture.exported import Exported
from penstock.model.capture.replay.module_shell import hooks_in
from penstock.model.capture.replayed import Replayed
from penstock.model.example import Call, read_example
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
    try:
        return Replayed(model, call, training=mode, reason=refusal or "requested")
    except PenstockError as error:
        raise CaptureError(_both(refusal, str(error))) from error
    except Exception as error:
        raise CaptureError(_both(refusal, f"{error_in_short(error)} {line_of(error)}")) from error


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
