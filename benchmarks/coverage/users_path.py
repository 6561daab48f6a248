"""The user's path: `Pipeline(model, example=…)` with its defaults, then `step`, compared with the plain model.

Lanes draw their own random numbers, so nothing may be random here: dropout is 0 in modules and configs, and torch's
random functions return their mean (`nothing_random`). Models of transformers call `.float()` on logits. Here that call
keeps float64; otherwise rounding could hide errors. Batch norm sees micro-batches by design, so a model with batch norm
is compared with the plain model called on one micro-batch after the other. The same holds for a model that computes in
float32, in part or as a whole, because its rounding depends on the size of the batch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from compare import Batch, Outcome, difference, restore, seed_all, snapshot, tensors_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import penstock
from penstock.errors import LaneError, PenstockError
from penstock.runtime.micro_batches import sizes_of

__all__ = ["nothing_random", "run_pipeline", "without_dropout"]


class SampleLoss:
    """The mean over samples of a weighted sum of all outputs. Each sample is multiplied by its target.

    Args:
        dim_of: for each output, the dimension of its samples; None if it has none.
    """

    def __init__(self, dim_of: dict[str, int | None]) -> None:
        self._dim_of = dim_of

    def __call__(self, out: Any, target: Tensor) -> Tensor:  # noqa: ANN401
        total = torch.zeros((), dtype=target.dtype)
        for path, x in tensors_of(out):
            if not x.requires_grad or not (x.is_floating_point() or x.is_complex()):
                continue
            real = torch.view_as_real(x).sum(-1) if x.is_complex() else x
            dim = self._dim_of.get(path)
            if dim is None:
                total = total + (real * _noise(real.shape).to(real.dtype)).sum() * target.mean()
            else:
                rows = real.movedim(dim, 0)
                each = rows.shape[0] // target.shape[0]
                rows = rows.reshape(target.shape[0], each, *rows.shape[1:])
                weighted = rows * _noise(rows.shape[1:]).to(rows.dtype)
                total = total + (weighted.flatten(1).sum(1) * target.to(rows.dtype)).mean()
        return total


class CoupledLoss(SampleLoss):
    """A loss that couples samples, as a contrastive loss does: the spread of one number per sample."""

    def __call__(self, out: Any, target: Tensor) -> Tensor:  # noqa: ANN401
        count = target.shape[0]
        total = torch.zeros(count, dtype=target.dtype)
        for path, x in tensors_of(out):
            dim = self._dim_of.get(path)
            is_square = x.dim() == 2 and x.shape[0] == x.shape[1] == count  # one value per pair of samples
            if dim is None or is_square or not x.requires_grad or not x.is_floating_point():
                continue
            rows = x.movedim(dim, 0).reshape(count, -1)
            total = total + (rows * _noise(rows.shape[1:]).to(rows.dtype)).sum(1)
        return (total * target).logsumexp(0) + total.std()


def _noise(shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every rate of dropout in modules and configs to 0."""
    things: list[Any] = list(model.modules())
    things += [config for module in things if (config := getattr(module, "config", None)) is not None]
    for thing in things:
        if not hasattr(thing, "__dict__"):
            continue
        inner = [value for key, value in vars(thing).items() if key.endswith("config") and hasattr(value, "__dict__")]
        for owner in (thing, *inner):
            for key, value in list(vars(owner).items()):
                is_rate = "drop" in key or (key == "p" and isinstance(owner, nn.modules.dropout._DropoutNd))
                if is_rate and isinstance(value, float):
                    setattr(owner, key, 0.0)
                elif key in ("apply_spec_augment", "mask_time_prob"):  # uses numpy's random numbers
                    owner.apply_spec_augment = False
    return model


@contextlib.contextmanager
def nothing_random() -> Iterator[None]:
    """Make torch's random functions return their mean, and make `.float()` keep float64."""
    to_float = Tensor.float

    def same(x: Tensor, *_: object, **__: object) -> Tensor:
        return x

    def like(mean: float) -> Callable[..., Tensor]:
        def make(x: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
            return torch.full_like(x, mean, **{k: v for k, v in options.items() if k in ("dtype", "device")})

        return make

    def filled(mean: float) -> Callable[..., Tensor]:
        def make(*size: Any, **options: Any) -> Tensor:  # noqa: ANN401
            shape = size[0] if size and isinstance(size[0], list | tuple | torch.Size) else size
            kept = {k: v for k, v in options.items() if k in ("dtype", "device")}
            return torch.full(tuple(options.get("size", shape)), mean, **{"dtype": torch.get_default_dtype()} | kept)

        return make

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(nn.functional, name, same))
        for name, change in {
            "rand": filled(0.5), "randn": filled(0.0), "rand_like": like(0.5), "randn_like": like(0.0),
            "bernoulli": lambda x, *_, **__: (x >= 0.5).to(x.dtype), "dropout": same,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch, name, change))
        for name, mean in {"uniform_": 0.5, "normal_": 0.0, "bernoulli_": 1.0, "exponential_": 1.0}.items():
            change = lambda x, *_, mean=mean, **__: x.fill_(mean)  # noqa: E731
            stack.enter_context(mock.patch.object(Tensor, name, change))
        keep = lambda x, **o: x if x.dtype == torch.float64 else to_float(x, **o)  # noqa: E731
        stack.enter_context(mock.patch.object(Tensor, "float", keep))
        yield


def _call(model: nn.Module, batch: Batch) -> Any:  # noqa: ANN401
    batch = batch.mapped(torch.clone)
    return model(*batch.args, **batch.kwargs)


def _has_own_loss(out: Any) -> bool:  # noqa: ANN401
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    is_loss = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    return is_loss or (isinstance(out, Tensor) and out.dim() == 0 and out.requires_grad)


def _own_loss(out: Any) -> Tensor:  # noqa: ANN401
    if isinstance(out, Tensor):
        return out
    return (out["loss"] if isinstance(out, dict) else out.loss).reshape(())


def _dims(model: nn.Module, batch: Batch, size: int) -> dict[str, int | None]:
    """Return, for each output, the dimension that grows with the batch size."""
    whole = {path: x.shape for path, x in tensors_of(_call(model, batch))}
    try:
        half = {path: x.shape for path, x in tensors_of(_call(model, batch.resized(size, size // 2)))}
    except Exception:  # the batch is no stack of samples (image patches in one list): rows follow the samples' order
        return {path: 0 if shape and shape[0] % size == 0 else None for path, shape in whole.items()}
    found: dict[str, int | None] = {}
    for path, shape in whole.items():
        other = half.get(path, shape)
        changed = [d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
        found[path] = changed[0] if len(changed) == 1 and shape[changed[0]] % size == 0 else None
    return found


def _plain(
    model: nn.Module,
    batch: Batch,
    target: Tensor | None,
    loss: Callable[..., Tensor] | None,
    sizes: Sequence[int],
    shares: Sequence[float] = (1.0,),
) -> Outcome:
    """Call the plain model on one piece of the batch after the other; return the results.

    Args:
        model: the plain model.
        batch: the arguments of the call.
        target: the target of the loss.
        loss: a function of the model's output and the target; None if the output is or has a loss.
        sizes: the number of samples in each piece.
        shares: the weight of the loss of each piece.
    """
    for parameter in model.parameters():
        parameter.grad = None
    seed_all()
    total, start, whole = torch.zeros((), dtype=torch.float64), 0, sum(sizes)
    for size, share in zip(sizes, shares, strict=True):
        rows = slice(start, start + size)
        out = _call(model, batch if size == whole else batch.rows(whole, range(start, start + size)))
        value = _own_loss(out) if loss is None else loss(out, target[rows])
        value = value * share
        if value.requires_grad:
            value.backward()
        total, start = total + value.detach(), start + size
    return _outcome(model, total.to(value.dtype))


def _outcome(model: nn.Module, loss: Tensor) -> Outcome:
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
    return Outcome("", "", {"the loss": loss.detach().clone()}, gradients, buffers)


def _without_empty(outcome: Outcome) -> Outcome:
    """Return an outcome in which all-zero gradients are None, because a pipeline may add zeros to no gradient."""
    gradients = {name: None if g is None or not g.to_dense().any() else g for name, g in outcome.gradients.items()}
    return Outcome(outcome.shape, outcome.own_loss, outcome.outputs, gradients, outcome.buffers)


def run_pipeline(model: nn.Module, batch: Batch, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the outcome for a model (right, refused, wrong, crashed or not comparable) and the reason.

    Args:
        model: a model without dropout.
        batch: the arguments of the call.
        size: the number of samples in the batch.
        dtype: the dtype of the model and the batch.
    """
    model.train()
    with nothing_random():
        saved = snapshot(model)
        out = _call(model, batch)
        loss = None if _has_own_loss(out) else SampleLoss(_dims(model, batch, size))
        restore(model, saved)
        target = None if loss is None else torch.linspace(0.5, 1.5, size, dtype=dtype)
        expected = _plain(model, batch, target, loss, [size])
        restore(model, saved)
        again = difference(_plain(model, batch, target, loss, [size]), expected, dtype)
        restore(model, saved)
        if again:
            return {"outcome": "not comparable", "why": f"the plain model differs from itself: {again}"}
        given = batch, loss, target, expected
        report = _tried(model, batch, loss, target, {})
        said = report["why"]
        if report["outcome"] == "refused" and "couples samples" in report["why"]:
            option = "loss_over='batch'"
            if loss is None:  # follow the message: let the model return its outputs, and pass a loss
                kwargs = {name: thing for name, thing in batch.kwargs.items() if name != "return_loss"}
                batch, option = Batch(batch.args, kwargs, batch.dim), f"{option} and loss="
                loss, target = CoupledLoss(_dims(model, batch, size)), torch.linspace(0.5, 1.5, size, dtype=dtype)
                restore(model, saved)
                expected = _plain(model, batch, target, loss, [size])
                restore(model, saved)
            report = _tried(model, batch, loss, target, {"loss_over": "batch"}) | {"option": option}
        for option, words in {"micro_batches": "micro_batches=1 ", "lanes": "lanes=1 "}.items():
            if report["outcome"] == "refused" and words in said + report["why"]:
                batch, loss, target, expected = given
                restore(model, saved)
                report = _tried(model, batch, loss, target, {option: 1}) | {"option": words.strip()}
        if "ours" not in report:
            return report
        ours, sizes, shares = (report.pop(key) for key in ("ours", "sizes", "shares"))
        off = difference(_without_empty(ours), _without_empty(expected), dtype)
        # running averages see micro-batches by design: in batch norm, and for ranges of numbers in ibert
        has_norm = any("BatchNorm" in type(m).__name__ for m in model.modules()) or " buffers differ" in off
        is_rounding = bool(off) and not difference(_without_empty(ours), _without_empty(expected), torch.float32)
        if off and (has_norm or is_rounding or dtype == torch.float32):
            restore(model, saved)
            whole = off
            if isinstance(loss, CoupledLoss):
                in_parts = _plain(_with_norms_in_parts(model, sizes), batch, target, loss, [sum(sizes)])
            else:
                in_parts = _plain(model, batch, target, loss, sizes, shares)
            off = difference(_without_empty(ours), _without_empty(in_parts), dtype)
            if off and is_rounding and _computes_in_float32(model, batch):
                off = difference(_without_empty(ours), _without_empty(in_parts), torch.float32)
                report["note"] += "; it computes in float32 in part"
            report["note"] += (
                f"{'; ' * bool(report['note'])}compared micro-batch by micro-batch; with the whole batch: {whole}"
            )
    return report | ({"outcome": "wrong", "why": off} if off else {"outcome": "right", "why": ""})


class _Float32(TorchFunctionMode):
    """Detects whether gradients pass through float32."""

    is_seen = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        made = function(*args, **(kwargs or {}))
        self.is_seen |= isinstance(made, Tensor) and made.dtype == torch.float32 and made.requires_grad
        return made


def _computes_in_float32(model: nn.Module, batch: Batch) -> bool:
    saved = snapshot(model)
    with _Float32() as seen:
        _call(model, batch)
    restore(model, saved)
    return seen.is_seen


def _with_norms_in_parts(model: nn.Module, sizes: Sequence[int]) -> nn.Module:
    """Return a copy of the model whose batch norms see one micro-batch after the other."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if "BatchNorm" in type(module).__name__:
            own = module.forward
            module.forward = lambda x, own=own: torch.cat([own(part) for part in x.split(list(sizes))])
    return model


def _tried(
    model: nn.Module, batch: Batch, loss: Callable[..., Tensor] | None, target: Tensor | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Make a pipeline and run a step; return the outcome."""
    for parameter in model.parameters():
        parameter.grad = None
    if batch.dim:
        options = {"batch_dim": batch.dim, **options}
    report: dict[str, Any] = {}
    try:
        with penstock.Pipeline(model, example=batch.kwargs or batch.args, loss=loss, **options) as pipe:
            captured = pipe.internals.captured
            report = {"path": captured.path, "nodes": len(captured.graph.nodes)}
            given = batch.mapped(torch.clone)
            value = pipe.step(given.kwargs or given.args, *(() if target is None else (target,)))
            size = next(x.shape[batch.dim] for x in batch.tensors() if x.dim() > batch.dim)
            ready = pipe._steps.reader.read(batch.kwargs or batch.args, () if target is None else (target,))
            sizes = sizes_of(size, pipe.schedule.num_mbs)
            report["note"] = "one micro-batch" if len(sizes) == 1 else ""
            report |= {"ours": _outcome(model, value), "sizes": sizes, "shares": ready.shares}
            return report | {"outcome": "ran", "why": ""}
    except PenstockError as error:
        is_told = not isinstance(error, LaneError) or isinstance(error.__cause__, PenstockError)
        return report | {"outcome": "refused" if is_told else "crashed", "why": _text(error)}
    except Exception as error:
        return report | {"outcome": "crashed", "why": _text(error)}


def _text(error: BaseException) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    place = f" [{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}]" if frames else ""
    cause = f" <- {_text(error.__cause__)}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:900]}{place}{cause}"
