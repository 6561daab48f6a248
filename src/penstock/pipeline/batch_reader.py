"""Batch reader: checks a batch, cuts it into micro-batches, and finds their loss weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.model.example import Call, arguments_of, array_hint
from penstock.model.stages import Chain
from penstock.model.structure import flatten
from penstock.pipeline.exactness.exactness import Exactness
from penstock.pipeline.splitting.batch_splits import Split, samples_of, split_batch
from penstock.runtime.loss_weights import CountRule
from penstock.runtime.losses import LossFunction, Weight, counts_of, loss_factors, needs_target, warn_of_uneven_tokens
from penstock.runtime.micro_batches import batch_dim_of, cut_batch, cut_structure, sizes_of
from penstock.runtime.step import Batch

_WATCHED_STEPS = 16  # the first steps, in which the default weights are checked against the targets
_MOST_KNOWN = 64  # shapes of batches
_WATCHED_ON_GPU = 1  # the same on a GPU, where each check makes the host wait


@dataclass(frozen=True)
class Ready:
    """A batch that can run: its micro-batches, their targets (one each, or none), and the weights of their losses."""

    batch: Batch
    targets: list[tuple[Any, ...]]
    shares: list[float]
    target_dims: tuple[int | None, ...] = ()  # the dimension in which each tensor of the target was cut
    total: torch.Tensor | None = None  # if losses are summed: the divisor of the sum; on the device
    samples: Sequence[int] | None = None  # if the user splits the batch: the samples in the loss of each micro-batch


def _count(counted: CountRule, batch: object, target: object) -> Any:  # noqa: ANN401, ARG001 - same signature as a user's weight
    return counted.count(target)


def _needs_sync(tensor: torch.Tensor) -> bool:
    """Return whether reading a tensor makes the host wait for a device."""
    return tensor.is_cuda


class BatchReader:
    """A reader of batches that are like the example."""

    def __init__(
        self, chain: Chain, num_mbs: int, *, loss: LossFunction | None, exactness: Exactness, split: Split | None
    ) -> None:
        self._chain, self._num_mbs, self._loss, self._exactness = chain, num_mbs, loss, exactness
        self._split = split
        self._left_to_watch = _WATCHED_STEPS
        self._known: dict[object, tuple[list[int], list[float]]] = {}  # sizes and shares of earlier batches, by `_key`

    def with_micro_batches(self, num_mbs: int) -> BatchReader:
        """Return a reader for another number of micro-batches."""
        return BatchReader(self._chain, num_mbs, loss=self._loss, exactness=self._exactness, split=self._split)

    def read(
        self, batch: object, target: tuple[Any, ...] | None, groups: Sequence[Sequence[int]] | None = None
    ) -> Ready:
        """Check a batch and cut it into micro-batches.

        Args:
            batch: a batch like the example.
            target: a tuple with the target, or an empty tuple; None if no loss is computed.
            groups: the micro-batches of each update, if the schedule updates weights within the step; the shares of a
                group add up to one.

        Raises:
            UsageError: if the batch is not like the example.
        """
        is_due = bool(target is not None and self._num_mbs > 1 and self._exactness.is_due())
        key = None if is_due else self._key(batch, target, groups)
        if key in self._known:
            assert isinstance(batch, torch.Tensor)
            self._chain.choose(replace(self._chain.example, tensors=(batch,), batch_size=batch.shape[0]))
            return self._again(batch, target, *self._known[key])
        if self._loss is not None and target == () and needs_target(self._loss):
            raise UsageError(
                "target: the loss takes one; pass it after the batch: step(batch, target), evaluate(batch, target)"
            )
        if self._split is not None:
            return self._read_split(batch, target, groups, is_due=is_due)
        call = self._read_call(batch)
        sizes = sizes_of(call.batch_size, self._num_mbs)
        pieces = cut_batch(call, sizes)
        dim = self._chain.example.batch_dim
        targets: list[tuple[Any, ...]] = [
            (piece,)
            for thing in target or ()
            for piece in cut_structure(self._checked(thing, call), call.batch_size, sizes, dim)
        ] or [()] * len(sizes)
        if target is None:  # no loss is computed
            return Ready(pieces, targets, loss_factors(None, [float(size) for size in sizes]))
        if len(sizes) > 1 and (is_due or self._exactness.must_compare(pieces, targets)):
            self._exactness.learn(call, target, dim)
        total = self._total(pieces, targets, groups)
        if total is not None:
            dims = self._target_dims(target, call.batch_size)
            return Ready(pieces, targets, [1.0] * len(sizes), dims, total)
        shares = self._shares(batch, pieces, targets, groups)
        if key is not None and (not self._left_to_watch or len(sizes) == 1):  # a single one has weight 1
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = (list(sizes), shares)
        return Ready(pieces, targets, shares, self._target_dims(target, call.batch_size))

    def _read_call(self, batch: object, *, is_part: bool = False) -> Call:
        """Read a batch of any shapes; a part must have the example's shapes, since all parts run the same programs."""
        args, kwargs = arguments_of(batch, "batch")
        read = self._chain.read if is_part else self._chain.read_any
        try:
            call = read(*args, **kwargs)
        except UsageError as error:
            raise UsageError(str(error).replace("the example holds", "the batch holds")) from None
        self._check_types(call)
        return call

    def _read_split(
        self, batch: object, target: tuple[Any, ...] | None, groups: Sequence[Sequence[int]] | None, *, is_due: bool
    ) -> Ready:
        """Return a batch in micro-batches, cut by the user's function."""
        assert self._split is not None
        if self._num_mbs == 1:  # nothing to cut
            made = [(batch, target or ())]
        else:
            made = split_batch(self._split, batch, target, self._num_mbs)
        calls, targets = [self._read_call(piece, is_part=True) for piece, _ in made], [own for _, own in made]
        sizes = [call.batch_size for call in calls]
        pieces = Batch([dict(zip(call.names, call.tensors, strict=True)) for call in calls], sizes)
        if target is None:
            return Ready(pieces, targets, loss_factors(None, [float(size) for size in sizes]))
        samples = samples_of(sizes, targets)
        if is_due and len(sizes) > 1:
            self._exactness.compare_split_target(target, sum(samples), calls, targets)
        shares = self._shares(batch, replace(pieces, sizes=samples), targets, groups, batches=[own for own, _ in made])
        return Ready(pieces, targets, shares, self._target_dims(target, sum(samples)), samples=samples)

    def _target_dims(self, target: tuple[Any, ...], batch_size: int) -> tuple[int | None, ...]:
        dim = self._chain.example.batch_dim
        return tuple(batch_dim_of(tensor, batch_size, dim) for tensor in flatten(target, apart=True)[0])

    @property
    def is_split(self) -> bool:
        """Whether a function of the user cuts batches."""
        return self._split is not None

    @property
    def weight(self) -> Weight | CountRule:
        """What the loss averages over; None for samples, and until it is found."""
        return self._exactness.weight

    @property
    def is_sum(self) -> bool:
        """Whether the losses of the micro-batches are summed instead of averaged."""
        return self._exactness.weight == "sum"

    def num_samples(self, batch: object) -> int:
        """Return the number of samples of a batch: the size of its batch dimension, or 0 if it has none."""
        example = self._chain.example
        found = batch.get(example.batch_name) if isinstance(batch, Mapping) else None
        if not isinstance(found, torch.Tensor):
            tensors = flatten(batch, apart=True)[0]
            at = example.names.index(example.batch_name)
            found = tensors[at if len(tensors) == len(example.names) else 0] if tensors else torch.zeros(())
        return int(found.shape[example.batch_dim]) if found.dim() > example.batch_dim else 0

    def _key(self, batch: object, target: object, groups: object) -> object:
        """Return the key of batches that share their sizes and shares; None if each batch must be examined."""
        is_plain = type(batch) is torch.Tensor and self._chain.example.batch_dims == (0,)
        if not is_plain or groups is not None or not isinstance(target, tuple) or self._exactness.alternatives:
            return None
        weight = self._exactness.weight
        if weight is not None and not (self._num_mbs == 1 and isinstance(weight, CountRule)):
            return None  # a single micro-batch has weight 1
        things = (batch, *target)
        if not all(type(thing) is torch.Tensor for thing in things):
            return None
        return tuple((thing.shape, thing.dtype) for thing in things)

    def _again(self, batch: Any, target: Any, sizes: list[int], shares: list[float]) -> Ready:  # noqa: ANN401
        """Return a batch with the stored sizes and shares of an earlier batch."""
        (name,) = self._chain.example.names
        count = len(sizes)
        pieces = [batch] if count == 1 else batch.split(sizes)
        targets: list[tuple[Any, ...]] = [()] * count
        for thing in target:
            is_cut = count > 1 and thing.dim() and thing.shape[0] == sum(sizes)
            targets = [(piece,) for piece in thing.split(sizes)] if is_cut else [(thing,)] * count
        return Ready(
            Batch([{name: piece} for piece in pieces], sizes), targets, shares, self._target_dims(target, sum(sizes))
        )

    def _check_types(self, call: Call) -> None:
        tensor_of = dict(zip(call.names, call.tensors, strict=True))
        example = self._chain.example
        wrong = [
            f"{name}: {tensor_of[name].dtype}, captured as {tensor.dtype}"
            for name, tensor in zip(example.names, example.tensors, strict=True)
            if tensor_of[name].dtype != tensor.dtype
        ]
        if wrong:
            raise UsageError(f"the batch is not like the example that was captured: {'; '.join(wrong)}")

    def _checked(self, target: Any, call: Call) -> Any:  # noqa: ANN401 - any target of the loss
        if not isinstance(target, torch.Tensor) or not target.dim():
            if hint := array_hint(target):  # it would not be cut: every micro-batch would get the whole array
                raise UsageError(f"target: {type(target).__name__}{hint}")
            return target
        if batch_dim_of(target, call.batch_size, self._chain.example.batch_dim) is None:
            raise UsageError(f"target: {target.shape[0]} samples, but the batch has {call.batch_size}")
        return target

    def _total(
        self, pieces: Batch, targets: Sequence[tuple[Any, ...]], groups: Sequence[Sequence[int]] | None
    ) -> torch.Tensor | None:
        """Return the divisor of the summed losses, a count of labels on the GPU; None if losses are averaged instead.

        Averaging needs the count of each micro-batch on the host. For labels on a GPU, the host would have to wait for
        it. So the losses are summed, and the sum is divided on the GPU.
        """
        weight = self._exactness.weight
        if not isinstance(weight, CountRule) or not self._exactness.is_summable or groups is not None:
            return None
        if len(targets) < 2:
            return None
        labels = self._labels(weight, pieces, targets)
        if not all(isinstance(label, torch.Tensor) and _needs_sync(label) for label in labels):
            return None
        counts = [weight.count(label) for label in labels]
        if not all(isinstance(count, torch.Tensor) for count in counts):
            return None
        return torch.stack([count.double() for count in counts]).sum()

    @staticmethod
    def _labels(weight: CountRule, pieces: Batch, targets: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return, for each micro-batch, the input of the model or the target in which the weight counts."""
        if weight.name:
            return [inputs[weight.name] for inputs in pieces.inputs]
        return [target[0] if target else None for target in targets]

    def _shares(
        self, batch: object, pieces: Batch, targets: Sequence[tuple[Any, ...]], groups: Sequence[Sequence[int]] | None,
        *, batches: Sequence[Any] = (),
    ) -> list[float]:  # fmt: skip
        sizes, weight = pieces.sizes, self._exactness.weight
        is_cut = bool(batches)
        batches = batches or [None] * len(sizes)
        if self._exactness.is_checked or weight is not None:
            self._left_to_watch = 0
        if not is_cut and (callable(weight) or self._left_to_watch):
            batches = cut_structure(batch, sum(sizes), sizes, self._chain.example.batch_dim)
        plain = [target[0] if target else None for target in targets]
        if isinstance(weight, CountRule):
            if len(sizes) == 1:
                return [1.0]
            plain = self._labels(weight, pieces, targets)
            weight = partial(_count, weight)
        if self._left_to_watch and len(sizes) > 1:
            if any(tensor.is_cuda for thing in (batch, plain[0]) for tensor in flatten(thing)[0]):
                self._left_to_watch = min(self._left_to_watch, _WATCHED_ON_GPU)
            self._left_to_watch -= 1
            if warn_of_uneven_tokens(self._loss, batches, plain):
                self._left_to_watch = 0
        if len(sizes) == 1 and self._exactness.weight is None:
            return [1.0]
        counts = counts_of(weight, batches, plain, sizes)
        if groups is None:
            return loss_factors(weight, counts)
        shares = [0.0] * len(sizes)
        for group in groups:
            here = [mb for mb in group if mb < len(sizes)]
            for mb, share in zip(here, loss_factors(weight, [counts[mb] for mb in here]), strict=True):
                shares[mb] = share
        return shares
