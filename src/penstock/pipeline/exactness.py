"""Exactness: find out, on a few samples, whether micro-batches add up to the batch, and how their losses count.

Nothing here knows the plain model's mathematics: it runs the captured model on a few samples of the example, whole and
in two parts, and compares. Random numbers and batch norm, which may differ by design, are set aside (`Still`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.example import Call
from penstock.model.modes import RandomStates
from penstock.model.put_back import put_back
from penstock.model.stages import Chain
from penstock.model.structure import flatten, rebuild
from penstock.model.untouched import untouched
from penstock.runtime.batches import cut_thing, join_results
from penstock.runtime.loss_weights import (
    IGNORED,
    Counted,
    FoundWeight,
    candidates,
    deviation,
    known_weight,
    loss_tolerance,
    tolerance,
)
from penstock.runtime.losses import LossFunction, Weight, find_loss
from penstock.runtime.still import Still

__all__ = ["Exactness"]

_ROWS = 5  # samples that are tried: two together and the others, for batch norm refuses one alone


@dataclass(frozen=True)
class _Run:
    """What the model made of a call: its tensors, and the object around them."""

    tensors: list[torch.Tensor]
    template: object

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.tensors), torch.device("cpu"))

    @property
    def output(self) -> Any:  # noqa: ANN401 - as the model
        return rebuild(self.template, self.tensors)


class _UnknownError(Exception):
    """Nothing can be compared: the model draws numbers that cannot be set aside, or fails by itself."""


class Exactness:
    """Says what the loss of each micro-batch counts, and refuses what no weights can express.

    Torch's own losses are known; of others it finds out once `check` was called.

    Args:
        loss: the user's.
        weight: what the user says that it averages over.
    """

    def __init__(self, loss: LossFunction | None, weight: Weight) -> None:
        self._loss = loss
        self.weight: Weight | Counted = weight
        self.is_settled = weight is not None
        if not self.is_settled:
            self.is_settled, self.weight = known_weight(loss)
        self._sizes: list[int] = []
        self._outputs: _Run | None = None

    def check(self, chain: Chain, model: nn.Module) -> None:
        """Compare a few samples of the example, whole and in parts.

        Args:
            chain: the captured model, where it can run.
            model: the user's, which stays as it is.

        Raises:
            UsageError: when parts do not add up to the whole; says which option makes it exact.
        """
        call = chain.example
        homes = {tensor.device for stage in chain.stages for tensor in stage.held.tensors()}
        if call.batch_size < 2 or len(homes) > 1 or torch.device("meta") in homes:
            return
        states = RandomStates()
        try:
            with _leaving_no_trace(chain, model), torch.no_grad():
                self._look(chain, call)
        except _UnknownError:
            self._outputs = None
        finally:
            states.restore()

    def _look(self, chain: Chain, call: Call) -> None:
        few = call.rows(list(range(min(_ROWS, call.batch_size))))
        self._sizes = [few.batch_size // 2, few.batch_size - few.batch_size // 2]
        if self._loss is None and not self.is_settled:
            self._find_inner_weight(chain, few)
            return
        try:
            whole, parts = _run(chain, few), self._parts(chain, few)
        except UsageError as error:
            if few.batch_size == call.batch_size or 1 in self._sizes or _fails(chain, call):
                raise _UnknownError from error
            raise self._refusal(chain, call, f"the example cut to {few.batch_size} samples fails: {error}") from error
        joined = join_results([part.tensors for part in parts], self._sizes, call.batch_dim)
        off = _largest_difference(whole.tensors, joined)
        if off:
            raise self._refusal(chain, call, off)
        self._outputs = whole

    def _parts(self, chain: Chain, few: Call) -> list[_Run]:
        rows, middle = list(range(few.batch_size)), self._sizes[0]
        return [_run(chain, few.rows(rows[:middle])), _run(chain, few.rows(rows[middle:]))]

    # ---- losses that the model computes itself

    def _find_inner_weight(self, chain: Chain, few: Call) -> None:
        """Find over what the model's own loss averages, by a batch whose labels are partly ignored."""
        name = next((n for n in few.names if n.split(".")[-1] == "labels"), "")
        for call in _with_ignored(few, name):
            try:
                runs = [_run(chain, call), *self._parts(chain, call)]
                whole, *parts = (find_loss(run.output, None, ()) for run in runs)
            except (UsageError, _UnknownError):
                continue
            if not all(loss.isfinite() for loss in (whole, *parts)):
                continue
            labels = self._labels(call, name)
            found = _exact(candidates(None, name), whole, parts, labels, self._sizes)
            if not found:
                raise UsageError(_COUPLED)
            self.weight, self.is_settled = found[0], True
            return

    def _labels(self, call: Call, name: str) -> list[Any]:
        if not name:
            return [None, None]
        place = call.names.index(name)
        dim = call.batch_dims[place]
        return list(torch.split(call.tensors[place], self._sizes, dim)) if dim is not None else [None, None]

    # ---- losses of the user's own

    def learn(self, target: tuple[Any, ...], batch_size: int, dim: int) -> None:
        """Find over what the user's loss averages, from the first target.

        Raises:
            UsageError: when losses of micro-batches cannot add up to that of the batch.
        """
        if self.is_settled or self._outputs is None or self._loss is None:
            return
        run, sizes = self._outputs, self._sizes
        self.is_settled, self._outputs = True, None
        rows = [sum(sizes), batch_size - sum(sizes)] if batch_size > sum(sizes) else [batch_size]
        few = [_moved(cut_thing(thing, batch_size, rows, dim)[0], run.device) for thing in target]
        outputs = [
            run,
            *(_Run(list(part), run.template) for part in zip(*_split(run.tensors, sizes, dim), strict=True)),
        ]
        exact: list[FoundWeight] | None = None
        for given in _ignoring(few):
            pieces = [tuple(p) for p in zip(*(cut_thing(t, sum(sizes), sizes, dim) for t in given), strict=True)]
            pieces = pieces or [()] * len(sizes)
            losses = _losses(self._loss, outputs, [tuple(given), *pieces])
            if losses is None:
                continue
            labels = [piece[0] if piece else None for piece in pieces]
            choices = candidates(self._loss) if exact is None else exact
            now = _exact(choices, losses[0], losses[1:], labels, sizes)
            if exact is None and not now:
                raise UsageError(_COUPLED)
            exact = now or exact
        if exact:
            self.weight = exact[0]

    def _refusal(self, chain: Chain, call: Call, facts: str) -> UsageError:
        others = [n for n, dim in zip(call.names, call.batch_dims, strict=True) if dim is not None]
        others.remove(call.batch_name)
        helps = [name for name in others if _is_exact_with_whole(chain, call, name, self._sizes)]
        if helps:
            advice = f"whole={helps} makes it exact: every micro-batch then gets {', '.join(helps)} whole"
        else:
            shape = tuple(call.tensors[call.names.index(call.batch_name)].shape)
            advice = (
                f"is dimension {call.batch_dim} of {call.batch_name} {shape} the batch? batch_dim= says which is, and "
                "whole=[...] which arguments every micro-batch gets whole"
            )
        return UsageError(
            f"micro-batches would not compute what the whole batch does: {facts}; {advice}. check=False turns this "
            "check off"
        )


_COUPLED = (
    "the loss of the batch is not a weighted sum of the losses of its micro-batches (tried: a mean over samples, a "
    "mean over the labels that are not ignored, a sum). It couples samples, as contrastive losses, a root of a mean or "
    "a masked mean do: give weight=, a function weight(batch, target) that returns over how much the loss of a "
    "micro-batch averages, or train with micro_batches=1. check=False turns this check off"
)


@contextlib.contextmanager
def _leaving_no_trace(chain: Chain, model: nn.Module) -> Iterator[None]:
    """Put back the buffers and attributes that runs change."""
    buffers = [
        (stage.held, name, stage.held.get(name), stage.held.get(name).detach().clone())
        for stage in chain.stages
        for name in stage.held
        if not isinstance(stage.held.get(name), nn.Parameter)
    ]
    try:
        with untouched(model):
            yield
    finally:
        for held, name, tensor, values in buffers:
            if held.get(name) is not tensor:
                held.set(name, tensor)
            put_back(tensor, values)


def _losses(
    loss: LossFunction, outputs: Sequence[_Run], targets: Sequence[tuple[Any, ...]]
) -> list[torch.Tensor] | None:
    """Return the loss of each output; None where one fails, is no number, or differs from call to call.

    A loss that is a module keeps its buffers, and random numbers are drawn as if nothing had been.
    """
    states = RandomStates()
    buffers = [(b, b.detach().clone()) for b in loss.buffers()] if isinstance(loss, nn.Module) else []
    pairs = list(zip(outputs, targets, strict=True))
    try:
        with torch.no_grad():
            found = [find_loss(run.output, loss, target) for run, target in [*pairs, pairs[0]]]
    except Exception:
        return None  # a loss need not take labels that are ignored; the step says what else is wrong
    finally:
        for buffer, values in buffers:
            put_back(buffer, values)
        states.restore()
    *losses, again = found
    is_sure = all(bool(loss.isfinite()) for loss in losses) and bool(torch.equal(again, losses[0]))
    return losses if is_sure else None


def _run(chain: Chain, call: Call) -> _Run:
    """Run the model on a call.

    Raises:
        UsageError: when it fails.
        _UnknownError: when it draws random numbers that cannot be set aside.
    """
    still = Still()
    try:
        with still:
            output = chain.run(call, lambda stage, values: stage(*values, batch_size=call.batch_size))
    except Exception as error:
        raise UsageError(f"{type(error).__name__}: {error}"[:400]) from error
    if still.is_random:
        raise _UnknownError
    tensors, template = flatten(output)
    return _Run([tensor.detach() for tensor in tensors], template)


def _fails(chain: Chain, call: Call) -> bool:
    try:
        _run(chain, call)
    except UsageError:
        return True
    return False


def _largest_difference(whole: Sequence[torch.Tensor], joined: Sequence[torch.Tensor]) -> str:
    """Return what differs most between results of a whole and of its parts; nothing where they are equal."""
    worst, said = 0.0, ""
    for number, (one, other) in enumerate(zip(whole, joined, strict=True)):
        if one.shape != other.shape or not one.dtype.is_floating_point or one.dim() == 0:
            continue
        if one.dtype not in (torch.float32, torch.float64):  # rounding may decide which way such a model takes
            continue
        off = float((one - other).norm() / one.norm().clamp(min=1e-30))
        if off > tolerance(one.dtype) and off > worst:
            worst, said = off, f"output {number} differs by {off:.2g} of its norm"
    return said


def _is_exact_with_whole(chain: Chain, call: Call, name: str, sizes: Sequence[int]) -> bool:
    """Return whether the example is exact when one argument stays whole."""
    place = call.names.index(name)
    dims = (*call.batch_dims[:place], None, *call.batch_dims[place + 1 :])
    few = replace(call, batch_dims=dims).rows(list(range(sum(sizes))))
    try:
        whole = _run(chain, few)
        rows = list(range(sum(sizes)))
        parts = [_run(chain, few.rows(part)) for part in (rows[: sizes[0]], rows[sizes[0] :])]
    except (UsageError, _UnknownError):
        return False
    joined = join_results([part.tensors for part in parts], sizes, call.batch_dim)
    return not _largest_difference(whole.tensors, joined)


def _with_ignored(call: Call, name: str) -> Iterator[Call]:
    """Yield a call with labels of its last sample ignored, where it has labels; then the call as it is."""
    if name:
        place = call.names.index(name)
        changes = list(_ignoring([call.tensors[place]])) if call.batch_dims[place] == 0 else []
        for (changed,) in reversed(changes):
            yield replace(call, tensors=(*call.tensors[:place], changed, *call.tensors[place + 1 :]))
    yield call


def _ignoring(target: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield a target with no label ignored, and once more with labels of its last sample ignored."""
    labels = target[0] if len(target) == 1 else None
    if not isinstance(labels, torch.Tensor) or labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        yield list(target)
        return
    labels = labels.where(labels != IGNORED, 0)
    yield [labels]
    if labels.dim() and labels.shape[0] > 2:
        changed = labels.clone()
        last = changed[-1:] if labels.dim() == 1 else changed[-1, ..., : -(-labels.shape[-1] // 2)]
        last.fill_(IGNORED)
        yield [changed]


def _exact(
    choices: Iterable[FoundWeight], whole: torch.Tensor, parts: Sequence[torch.Tensor], labels: Sequence[Any],
    sizes: Sequence[int],
) -> list[FoundWeight]:  # fmt: skip
    """Return the weights under which the parts add up, as far as rounding lets them be told apart, in their order.

    Losses of a fresh model are nearly the same for all samples, so that wrong weights come close too: what counts is
    how much further off they are than the best.
    """
    off = {choice: deviation(choice, whole, parts, labels, sizes) for choice in choices}
    most = max(10 * min(off.values()), 16 * torch.finfo(whole.dtype).eps)
    return [choice for choice, much in off.items() if much <= min(most, loss_tolerance(whole.dtype))]


def _split(tensors: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> list[list[torch.Tensor]]:
    return [cut_thing(tensor, sum(sizes), sizes, dim) for tensor in tensors]


def _moved(thing: Any, device: torch.device) -> Any:  # noqa: ANN401 - whatever holds tensors
    tensors, template = flatten(thing, apart=True)
    return rebuild(template, [tensor.to(device) for tensor in tensors])
