"""Scoring: run a captured model and a loss on a few samples, and compare the whole with its parts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.example import Call
from penstock.model.preserve import RandomStates, preserve_attributes, restore_values
from penstock.model.stages import Chain
from penstock.model.structure import flatten, rebuild
from penstock.runtime.deterministic import Deterministic
from penstock.runtime.loss_weights import (
    CountRule,
    gradient_tolerance,
    loss_tolerance,
    tolerance,
    total_gradient_tolerance,
)
from penstock.runtime.losses import LossFunction, SumReductionMode, find_loss, read_loss
from penstock.runtime.micro_batches import join_dim_of

_MOST_PERTURBED = 1 << 16  # elements of a perturbed parameter
_MOST_COMPARED = 1 << 28  # elements of all compared gradients
_PERTURBED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

CHANGES = "it changes with each call"


@dataclass(frozen=True)
class Run:
    """The output of the model for one call, as tensors and a template."""

    tensors: list[torch.Tensor]
    template: object

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next((tensor.device for tensor in self.tensors), torch.device("cpu"))

    @property
    def output(self) -> Any:  # noqa: ANN401 - any output of a model
        """The output in the form that the model returned."""
        return rebuild(self.template, self.tensors)

    def on(self, device: torch.device) -> Run:
        """Return the run with its tensors on a device."""
        return replace(self, tensors=[tensor.to(device) for tensor in self.tensors])

    def leaves(self) -> Run:
        """Return the run with leaf tensors, so that their gradients can be computed."""
        return replace(self, tensors=[t.detach().requires_grad_(t.is_floating_point()) for t in self.tensors])


@dataclass(frozen=True)
class Scored:
    """A loss, and its gradients with respect to the outputs of the model, if it has any."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The type of the loss and the least precise type of its gradients: 16-bit models often have 32-bit losses."""
        dtypes = [g.dtype for g in self.gradients if g is not None]
        return self.loss.dtype, max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=self.loss.dtype)


class NotComparableError(Exception):
    """Raised if nothing can be compared: the model draws random numbers that cannot be replaced, or fails itself."""


@contextlib.contextmanager
def preserved_model(chain: Chain, model: nn.Module) -> Iterator[None]:
    """Restore the buffers and attributes that runs change, on exit."""
    buffers = [
        (stage.held, name, stage.held.get(name), stage.held.get(name).detach().clone())
        for stage in chain.stages
        for name in stage.held
        if not isinstance(stage.held.get(name), nn.Parameter)
    ]
    try:
        with preserve_attributes(model):
            yield
    finally:
        for held, name, tensor, values in buffers:
            if held.get(name) is not tensor:
                held.set(name, tensor)
            restore_values(tensor, values)


@contextlib.contextmanager
def perturbed(chain: Chain) -> Iterator[None]:
    """Change the small parameters (biases, scales, norms) slightly; restore their exact values on exit.

    On a fresh model, a wrong weight may happen to fit: with a scale or a last layer of zeros, all samples have the same
    loss.
    """
    small = {
        id(tensor): tensor
        for stage in chain.stages
        for tensor in (stage.held.get(name) for name in stage.held)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.dtype in _PERTURBED
        if tensor.numel() <= _MOST_PERTURBED
    }
    before = [(parameter, parameter.detach().clone()) for parameter in small.values()]
    try:
        with torch.no_grad():
            for number, (parameter, values) in enumerate(before):
                noise = torch.sin(torch.arange(values.numel()) * 1.7 + number + 1).view(values.shape) / 8
                with contextlib.suppress(RuntimeError):  # an expanded tensor cannot be written
                    parameter.add_(noise.to(values.device, values.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, values in before:
                with contextlib.suppress(RuntimeError):
                    parameter.copy_(values)


def score_losses(
    loss: LossFunction, outputs: Sequence[Run], targets: Sequence[tuple[Any, ...]], deterministic: Deterministic
) -> list[Scored] | str:
    """Return the loss of each output, or the reason why the losses cannot be compared.

    The buffers of a loss module and the random states are preserved.
    """
    states = RandomStates()
    buffers = [(b, b.detach().clone()) for b in loss.buffers()] if isinstance(loss, nn.Module) else []
    pairs = [(run.leaves(), target) for run, target in zip(outputs, targets, strict=True)]
    try:
        with torch.enable_grad(), deterministic:
            found = [find_loss(run.output, loss, target) for run, target in [*pairs, pairs[0]]]
            scored = [
                Scored(value.detach(), _gradients(value, run)) for value, (run, _) in zip(found, pairs, strict=False)
            ]
    except Exception as error:  # a loss may refuse ignored labels; if the loss itself fails, the step reports it
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        for buffer, values in buffers:
            restore_values(buffer, values)
        states.restore()
    if deterministic.is_random:
        return "it draws random numbers"
    if scored[0].loss.isfinite() and not torch.equal(found[-1].detach(), scored[0].loss):
        return CHANGES
    if not scored[0].loss.isfinite() or not any(one.loss.isfinite() for one in scored[1:] or scored):
        return "it is not finite"
    return scored


def is_own_sum(
    loss: LossFunction, outputs: Sequence[Run], targets: Sequence[tuple[Any, ...]], counted: CountRule
) -> bool:
    """Return whether a loss under `SumReductionMode` is the plain loss times the count that it averages over.

    The answer is False for a loss that also returns metrics, since `SumReductionMode` could change these.
    """
    for run, target in zip(outputs, targets, strict=True):
        count = float(counted.count(target[0])) if target else 0.0
        if not count:  # an empty mean
            continue
        means = score_losses(loss, [run], [target], Deterministic())
        with SumReductionMode():
            sums = score_losses(loss, [run], [target], Deterministic())
        if isinstance(means, str) or isinstance(sums, str):
            return False
        most = Distance(*(loss_tolerance(dtype) for dtype in means[0].dtypes))
        if not distance_of([1 / count], [means[0], sums[0]], sizes=[1]).is_within(most):
            return False
        if read_loss(run.output, loss, target)[1]:
            return False
    return True


def _gradients(loss: torch.Tensor, run: Run) -> list[torch.Tensor | None]:
    wanted = [tensor for tensor in run.tensors if tensor.requires_grad]
    if not loss.requires_grad or not wanted:
        return []
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in run.tensors]


@dataclass(frozen=True)
class Distance:
    """The difference between the weighted parts and the whole, relative to the whole."""

    loss: float  # the difference of the loss
    gradients: float  # the largest difference of its gradients

    def is_within(self, most: Distance) -> bool:
        """Return whether both differences are at most those of another distance."""
        return self.loss <= most.loss and self.gradients <= most.gradients


_FAR = Distance(float("inf"), float("inf"))


def distance_of(
    shares: Sequence[float] | None, scored: Sequence[Scored], *, dim: int = 0, sizes: Sequence[int] = ()
) -> Distance:
    """Return the distance of the weighted losses and gradients of the parts from those of the whole.

    A part in which all labels are ignored has no finite loss; its share must be zero.
    """
    if shares is None or any(share and not one.loss.isfinite() for share, one in zip(shares, scored[1:], strict=True)):
        return _FAR
    whole, *parts = scored
    joined = sum(share * float(part.loss) for share, part in zip(shares, parts, strict=True) if share)
    scale = max(1e-30, *(abs(float(one.loss)) for one in scored if one.loss.isfinite()))
    off = 0.0
    for number, gradient in enumerate(whole.gradients):
        pieces = [part.gradients[number] for part in parts if part.gradients]
        if gradient is None and not any(piece is not None for piece in pieces):
            continue
        if gradient is None or len(pieces) < len(parts) or any(piece is None for piece in pieces):
            return _FAR
        weighed = [
            share * piece if share else torch.zeros_like(piece)
            for share, piece in zip(shares, pieces, strict=True)
            if piece is not None
        ]
        off = max(off, _distance(gradient, weighed, dim, sizes))
    return Distance(abs(float(whole.loss) - joined) / scale, off)


def _distance(whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, sizes: Sequence[int]) -> float:
    """Return the relative difference between the gradient of an output and those of its parts; 0 if it is unknown."""
    own = join_dim_of(parts, sizes, dim)
    if own is None and all(part.shape == whole.shape for part in parts):
        joined = torch.stack(list(parts)).sum(0)  # one value for the whole batch: gradients add up
    elif own is None:
        return 0.0
    else:
        joined = torch.cat(list(parts), own)
    if joined.shape != whole.shape:
        return 0.0
    return float((whole - joined).norm() / whole.norm().clamp(min=1e-30))


def fitting_weights(off: Mapping[Any, Distance], dtypes: tuple[torch.dtype, torch.dtype]) -> list[Any]:
    """Return the weights under which the parts add up, as far as rounding can distinguish them, in their order.

    The losses of a fresh model are nearly the same for all samples, so wrong weights come close too. A weight is
    therefore compared with the best one.
    """

    def most(of: list[float], dtype: torch.dtype) -> float:
        return min(max(10 * min(of), 16 * torch.finfo(dtype).eps), loss_tolerance(dtype))

    own, others = dtypes
    limit = Distance(
        most([one.loss for one in off.values()], own), most([one.gradients for one in off.values()], others)
    )
    return [choice for choice, one in off.items() if one.is_within(limit)]


def run_call(chain: Chain, call: Call) -> Run:
    """Run the model on a call.

    Raises:
        UsageError: if it fails.
        NotComparableError: if it draws random numbers that cannot be replaced.
    """
    deterministic = Deterministic()
    try:
        with deterministic:
            output = chain.run(call, lambda stage, values: stage(*values, batch_size=call.batch_size))
    except Exception as error:
        raise UsageError(f"{type(error).__name__}: {error}"[:400]) from error
    if deterministic.is_random:
        raise NotComparableError
    tensors, template = flatten(output)
    return Run([tensor.detach() for tensor in tensors], template)


def largest_gradient_difference(chain: Chain, call: Call, parts: Sequence[Call], shares: Sequence[float]) -> str:
    """Return the name and the difference of the gradient that differs most between a call and its weighted parts.

    The result is empty if all agree. Small parameters come first; of large models, only as many are compared as
    `_MOST_COMPARED` allows. Some gradients are only rounding, such as those of the biases of attention keys, so their
    relative differences are large. A difference therefore counts only if it is also visible relative to all gradients.
    """
    held = {stage.held.get(name): name for stage in chain.stages for name in stage.held}
    wanted = sorted((t for t in held if isinstance(t, nn.Parameter) and t.requires_grad), key=torch.Tensor.numel)
    room = itertools.accumulate(parameter.numel() for parameter in wanted)
    wanted = [parameter for parameter, total in zip(wanted, room, strict=True) if total <= _MOST_COMPARED]
    try:
        dtype, whole = _loss_gradients(chain, call, wanted)
        for part, share in zip(parts, shares, strict=True):
            if share:
                for own, other in zip(whole, _loss_gradients(chain, part, wanted)[1], strict=True):
                    own[1].sub_(other[1], alpha=share)
    except (UsageError, NotComparableError, RuntimeError):  # then only the losses are compared
        return ""
    total = sum(size**2 for size, _ in whole) ** 0.5
    worst, said = 1.0, ""
    for parameter, (size, difference) in zip(wanted, whole, strict=True):
        coarse = max(parameter.dtype, dtype, key=lambda one: torch.finfo(one).eps)
        of_own, of_all = gradient_tolerance(coarse), total_gradient_tolerance(coarse)
        off = float(difference.norm()) / max(of_own * size, of_all * total, 1e-30)
        if off > worst:
            worst, said = off, f"{held[parameter]}, by {float(difference.norm()) / max(size, 1e-30):.2g} of its norm"
    return said


def _loss_gradients(
    chain: Chain, call: Call, wanted: Sequence[nn.Parameter]
) -> tuple[torch.dtype, list[tuple[float, torch.Tensor]]]:
    """Return the type of the model's own loss, and the norm and the gradient of each parameter."""
    deterministic = Deterministic()
    with torch.enable_grad(), deterministic:
        output = chain.run(call, lambda stage, values: stage(*values, batch_size=call.batch_size))
        loss = find_loss(output, None, ())
        found = torch.autograd.grad(loss, list(wanted), allow_unused=True)
    if deterministic.is_random:
        raise NotComparableError
    dense = [
        torch.zeros_like(parameter)
        if gradient is None
        else gradient.detach().to_dense()
        if gradient.is_sparse
        else gradient
        for parameter, gradient in zip(wanted, found, strict=True)
    ]
    return loss.dtype, [(float(gradient.norm()), gradient.detach().clone()) for gradient in dense]


def call_fails(chain: Chain, call: Call) -> bool:
    """Return whether the model fails on a call."""
    try:
        run_call(chain, call)
    except UsageError:
        return True
    return False


def parts_of(call: Call, sizes: Sequence[int]) -> list[Call]:
    """Return the parts of a call that have the given numbers of samples."""
    bounds = [0, *itertools.accumulate(sizes)]
    return [call.rows(list(range(start, stop))) for start, stop in itertools.pairwise(bounds)]


def largest_difference(
    whole: Sequence[torch.Tensor], joined: Sequence[torch.Tensor], *, with_numbers: bool = False
) -> str:
    """Return the largest difference between the results of a whole and of its parts; empty if there is none."""
    if len(whole) != len(joined):
        return f"the whole returns {len(whole)} tensors, and its parts {len(joined)}"
    worst, said = 0.0, ""
    for number, (one, other) in enumerate(zip(whole, joined, strict=True)):
        if one.shape != other.shape or (one.dim() == 0 and not with_numbers):
            continue
        if one.dtype not in (torch.float32, torch.float64):  # rounding may change the control flow of a 16-bit model
            continue
        off = float((one - other).norm() / one.norm().clamp(min=1e-30))
        if off > tolerance(one.dtype) and off > worst:
            worst, said = off, f"output {number} differs by {off:.2g} of its norm"
    return said
