"""Exactness: find out on a few samples whether micro-batches add up to the batch, and how much each loss counts.

The check needs no knowledge of the mathematics of the model. It runs the captured model on a few samples of the
example, once as a whole and once in two parts, and compares the results. Random numbers and batch norm may differ by
design, so `Deterministic` replaces them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.devices.kinds import kind_of
from penstock.errors import UsageError, warn_user
from penstock.model.example import Call, arguments_of
from penstock.model.preserve import RandomStates
from penstock.model.stages import Chain
from penstock.model.structure import flatten
from penstock.pipeline.exactness.exactness_advice import (
    advice_for,
    balances_experts,
    broadcast_of,
    check_own_weight,
    option_for,
)
from penstock.pipeline.exactness.loss_samples import (
    FEW,
    artificial_labels,
    as_batch,
    choices_of_rows,
    ignoring,
    label_names,
    moved_to,
    probe_tolerance,
    probes,
    rows_of,
    special_values,
    with_ignored,
)
from penstock.pipeline.exactness.scoring import (
    CHANGES,
    Distance,
    NotComparableError,
    Run,
    Scored,
    call_fails,
    distance_of,
    fitting_weights,
    is_own_sum,
    largest_difference,
    largest_gradient_difference,
    parts_of,
    perturbed,
    preserved_model,
    run_call,
    score_losses,
)
from penstock.pipeline.splitting.batch_splits import PackedSplit, Split, samples_of, split_batch
from penstock.runtime.deterministic import Deterministic
from penstock.runtime.loss_weights import (
    CountRule,
    candidates,
    settings_of,
    shares_with,
    weight_of_torch_loss,
)
from penstock.runtime.losses import LossFunction, Weight, counts_of, find_loss, loss_factors
from penstock.runtime.micro_batches import cut_structure, join_results, join_rows
from penstock.runtime.step import Batch

Target = tuple[Any, ...]  # the target of a batch, or nothing

_HOST = torch.device("cpu")
_MOST_ON_GPU = 3  # compared targets on a GPU once a single weight is left; the host waits for each
_MOST_COUNTED = 1024  # samples of a batch that is searched for distinguishing samples, one by one
_MOST_STEPS = 32  # between two comparisons
_MOST_FRUITLESS = 16  # comparisons in a row that exclude no weight; later, only targets that are due are compared


class OnlyWholeError(UsageError):
    """Raised if only one micro-batch is known to be exact: no option of the pipeline makes several exact."""


class Exactness:
    """Finds how much the loss of each micro-batch counts, and refuses models and losses for which no weights are exact.

    The losses of torch are known. All other losses are tried on targets after `check` was called.

    Attributes:
        weight: the quantity that the loss averages over, as far as it is known.
        is_settled: whether nothing is left to find out.
        is_summable: whether the loss under `SumReductionMode` is the plain loss times the count that it averages over.
        device: the device on which the loss will run.
    """

    def __init__(
        self, loss: LossFunction | None, weight: Weight, *, over_batch: bool = False, is_compiled: bool = False
    ) -> None:
        self._loss, self._given, self._over_batch, self._is_compiled = loss, weight, over_batch, is_compiled
        self.weight: Weight | CountRule = weight
        self.is_settled = True
        if weight is None and not over_batch:
            self.is_settled, self.weight = weight_of_torch_loss(loss)
        self._is_known = self.is_settled and weight is None and not over_batch  # a loss of torch
        self._settings = settings_of(loss) if self._is_known else ()
        self.is_summable = self._is_known and loss is not None and not is_compiled
        self.device: torch.device | None = None
        self._sizes: list[int] = []
        self._split_sizes: list[int] = []  # the batch sizes of the user's micro-batches
        self._runs: list[Run] = []  # of the whole, and of its parts
        self._exact: list[Any] | None = None  # the weights under which all targets so far were exact
        self._num_targets = 0
        self._failure_reason = ""  # why the first target could not be compared
        self._next_compared = 1
        self._is_probed = False
        self._moved: list[Run] = []  # the runs on the device of the loss, while a target is compared
        self._num_fruitless = 0  # comparisons in a row that excluded no weight

    # ---- the model

    def check(self, chain: Chain, model: nn.Module, *, example: object = None, split: Split | None = None) -> None:
        """Compare a few samples of the example, as a whole and in parts; the model is left unchanged.

        If the user splits batches, `split` cuts the user's example.

        Raises:
            UsageError: if the parts do not add up to the whole; the message names an option that makes them exact.
        """
        call = chain.example
        homes = {tensor.device for stage in chain.stages for tensor in stage.held.tensors()}
        if (call.batch_size < 2 and split is None) or len(homes) > 1 or torch.device("meta") in homes:
            return
        states = RandomStates()
        try:
            with preserved_model(chain, model), torch.no_grad():
                if split is None:
                    self._look(chain, call, model)
                else:
                    self._compare_split(chain, example, split)
        except NotComparableError:
            self._runs = []
        finally:
            states.restore()
            for home in set(homes):  # the lanes need the memory of the comparison
                kind_of(home).release_memory()

    def _look(self, chain: Chain, call: Call, model: nn.Module) -> None:
        few = call.rows(list(range(min(FEW, call.batch_size))))
        self._sizes = [few.batch_size // 2, few.batch_size - few.batch_size // 2]
        if self._loss is None:
            if balances_experts(model):
                raise OnlyWholeError(
                    f"the model adds its router's auxiliary loss to the loss. {_INNER_TERM}. {_CHECK_OFF}"
                )
            self._check_fewer(chain, few, call, model)
            self._find_inner_weight(chain, with_ignored(few, label_names(few)), label_names(few))
            return
        try:
            whole = run_call(chain, few)
        except UsageError as error:
            if few.batch_size == call.batch_size or call_fails(chain, call):
                raise NotComparableError from error  # the model itself fails, so the step will report it
            raise self._refusal(model, call, f"the example cut to {few.batch_size} samples fails: {error}") from error
        try:
            parts = [run_call(chain, part) for part in parts_of(few, self._sizes)]
        except UsageError as error:
            if min(self._sizes) == 1:  # many models refuse a batch of one sample
                raise NotComparableError from error
            raise self._refusal(model, call, f"a part of the example fails: {error}") from error
        joined = join_results([part.tensors for part in parts], self._sizes, call.batch_dim)
        self._check_shapes(whole.tensors, joined)
        off = largest_difference(whole.tensors, joined, with_numbers=self._over_batch)
        if off:
            self._check_calls_count(chain, few)
            raise self._refusal(model, call, off)
        self._runs = [run.on(_HOST) for run in (whole, *parts)]
        self.is_settled = False  # known and given weights are checked too: targets may have a wrong shape

    def _check_shapes(self, whole: Sequence[torch.Tensor], joined: Sequence[torch.Tensor]) -> None:
        """Refuse a loss of torch on an output that has, for example, one entry per pair of samples."""
        if not self._is_known or len(whole) != 1 or whole[0].shape == joined[0].shape:
            return
        raise OnlyWholeError(
            f"the model returns {tuple(whole[0].shape)} for {sum(self._sizes)} samples, but its outputs for "
            f"{self._sizes[0]} and {self._sizes[1]} of them cannot be joined to this shape: it compares the samples of "
            f"a batch with each other. Let it return values per sample, and compare them in a loss with "
            f"loss_over='batch'; micro_batches=1 runs it unchanged. {_CHECK_OFF}"
        )

    def _check_fewer(self, chain: Chain, few: Call, call: Call, model: nn.Module) -> None:
        """Refuse an example that fails only with fewer samples: for example, one list of the patches of all images."""
        try:
            run_call(chain, few)
        except UsageError as error:
            if few.batch_size == call.batch_size or call_fails(chain, call):
                return  # the model itself fails, so the step will report it
            raise self._refusal(model, call, f"the example cut to {few.batch_size} samples fails: {error}") from error

    def _check_calls_count(self, chain: Chain, few: Call) -> None:
        """Refuse a model whose result depends on how often it was called; name the buffers that change."""
        held = {name: stage.held.get(name) for stage in chain.stages for name in stage.held}
        before = {name: t.detach().clone() for name, t in held.items() if not isinstance(t, nn.Parameter)}
        first, second = run_call(chain, few), run_call(chain, few)
        off = largest_difference(first.tensors, second.tensors)
        if not off:
            return
        after = {name: stage.held.get(name) for stage in chain.stages for name in stage.held if name in before}
        names = [name for name, values in before.items() if not torch.equal(values, after[name])]
        what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "its state"
        raise OnlyWholeError(
            f"the model's result depends on how often it was called: in two calls with the same samples, {off}. Each "
            f"call changes {what}, and every micro-batch is a call, as in gradient accumulation. check=False accepts "
            "this; micro_batches=1 calls the model once per step"
        )

    def _compare_split(self, chain: Chain, example: object, split: Split) -> None:
        """Compare the whole example with the micro-batches that the user's split makes of it."""
        args, kwargs = arguments_of(example)
        whole = chain.read(*args, **kwargs)
        pieces = [arguments_of(piece) for piece, _ in split_batch(split, example, None, 2)]
        parts = [chain.read(*args, **kwargs) for args, kwargs in pieces]
        self._sizes = self._split_sizes = [part.batch_size for part in parts]
        if len(parts) < 2:
            raise NotComparableError
        if self._loss is None:
            self._find_inner_weight(chain, [(whole, parts)], label_names(whole, is_split=True))
            return
        try:
            runs = [run_call(chain, one) for one in (whole, *parts)]
        except UsageError as error:
            raise UsageError(
                f"split: the model fails on the example or on its micro-batches: {error}. {_CHECK_OFF}"
            ) from error
        self._sizes = samples_of(self._sizes, [tuple(run.tensors) for run in runs[1:]])
        (rows,) = samples_of([sum(self._sizes)], [tuple(runs[0].tensors)])
        if sum(self._sizes) != rows:
            raise UsageError(
                f"split: the model returns {sum(self._sizes)} rows for its micro-batches together, but {rows} for the "
                f"batch. {_CHECK_OFF}"
            )
        joined = join_rows([run.tensors for run in runs[1:]], self._sizes)
        off = largest_difference(runs[0].tensors, joined, with_numbers=self._over_batch)
        if off:
            kind = OnlyWholeError if isinstance(split, PackedSplit) else UsageError  # a split that Penstock chose
            raise kind(
                f"split: its micro-batches do not compute the same result as the whole batch: {off}; micro_batches=1 "
                f"runs the whole batch. {_CHECK_OFF}"
            )
        self._runs, self.is_settled = [run.on(_HOST) for run in runs], False

    # ---- losses that the model computes itself

    def _find_inner_weight(
        self, chain: Chain, calls: Iterable[tuple[Call, Sequence[Call]]], names: Sequence[str]
    ) -> None:
        """Find the quantity that the model's own loss averages over, from calls and their parts."""
        exact: list[Any] | None = None
        is_fitting = True  # whether some weights fit the last call with unperturbed parameters
        compared = list(calls)
        for (call, parts), is_perturbed in itertools.product(compared, (False, True)):
            try:
                with perturbed(chain) if is_perturbed else contextlib.nullcontext():
                    runs = [run_call(chain, one) for one in (call, *parts)]
                losses = [find_loss(run.output, None, ()) for run in runs]
            except (UsageError, NotComparableError):
                continue
            if not all(loss.isfinite() for loss in losses):
                continue
            choices = self._choices(names, [], []) if exact is None else exact
            found = {
                choice: distance_of(
                    self._shares(choice, parts, [()] * len(parts)), [Scored(loss, []) for loss in losses]
                )
                for choice in choices
            }
            now = fitting_weights(found, (losses[0].dtype, losses[0].dtype))
            if not now and (exact is None or (is_perturbed and is_fitting)):
                raise self._coupled(losses)
            is_fitting = bool(now)
            exact = now or exact
        if exact:
            self._check_gradients(chain, compared, exact[0])
            self.weight, self.is_settled = exact[0], True

    def _check_gradients(self, chain: Chain, compared: Sequence[tuple[Call, Sequence[Call]]], weight: object) -> None:
        """Compare the gradients of the parameters, since rounding of the loss hides a small term that couples samples.

        The load-balancing loss of a mixture of experts is an example: 1e-6 of the loss, but a tenth of the router's
        gradient.

        Raises:
            UsageError: if they differ, both with the unchanged and with the perturbed model.
        """
        worst = ""
        for (call, parts), is_perturbed in itertools.product(compared[-1:], (False, True)):
            shares = self._shares(weight, parts, [()] * len(parts))
            if shares is None:
                return
            with perturbed(chain) if is_perturbed else contextlib.nullcontext():
                worst = largest_gradient_difference(chain, call, parts, shares)
            if not worst:  # rounding may send a sample to another expert in one run, but not in both
                return
        raise OnlyWholeError(
            "micro-batches would not compute the same result as the whole batch: the loss adds up, but a gradient "
            f"differs: that of {worst}. {_INNER_TERM}. {_CHECK_OFF}"
        )

    def _choices(
        self, names: Sequence[str], target: Sequence[torch.Tensor], left_out: Sequence[tuple[int, torch.Tensor | None]]
    ) -> list[Any]:
        if self._given is not None:
            return [self._given]
        return [self.weight] if self._is_known else list(candidates(names, target, left_out))

    def _shares(self, choice: Any, parts: Sequence[Call], targets: Sequence[Target]) -> list[float] | None:  # noqa: ANN401
        """Return how much the loss of each part counts for a choice of weight; None if nothing counts."""
        plain = [target[0] if target else None for target in targets]
        if callable(choice):
            batches = [as_batch(part) for part in parts]
            try:
                return loss_factors(choice, counts_of(choice, batches, plain, self._sizes))
            except UsageError:
                return None
        if isinstance(choice, CountRule) and choice.name:
            plain = [part.tensors[part.names.index(choice.name)] for part in parts]
        return shares_with(choice, self._sizes, plain)

    # ---- losses of the user's own

    @property
    def is_checked(self) -> bool:
        """Whether the loss is known or will be compared, so that it needs no warning."""
        return self.is_settled or bool(self._runs)

    def is_due(self) -> bool:
        """Count a target; return whether it must be compared.

        Also warn if the first target could not be compared. The warning comes only after a step has ended: if the loss
        itself fails, that step reports it.

        Raises:
            UsageError: if the settings of a loss of torch were replaced.
        """
        if self._settings and self._settings != settings_of(self._loss):
            raise UsageError(
                "loss: its reduction, weight or ignore_index was replaced after the pipeline was made, but the "
                "pipeline has already read it. Change a weight in place (loss.weight.copy_), or make a new pipeline"
            )
        if self._failure_reason:
            warn_user(
                f"the loss could not be compared with that of micro-batches: {self._failure_reason}. If it is not a "
                "mean over samples, pass weight=, the quantity that it averages over; check=False turns this check off"
            )
            self._failure_reason = ""
        if self.is_settled or not self._runs or self._loss is None:
            return False
        self._num_targets += 1
        return self._num_targets >= self._next_compared

    def learn(self, call: Call, target: Target, dim: int) -> None:
        """Find the quantity that the user's loss averages over, from a target.

        Later targets are compared too, but less and less often. They are needed because a mask may leave out nothing
        in one batch and much in the next.

        Raises:
            UsageError: if the losses of micro-batches cannot add up to that of the batch.
        """
        moved = call.map(lambda tensor: tensor.to(self.device or _HOST))

        def parts(rows: list[int]) -> Sequence[Call]:
            return parts_of(moved.rows(rows), self._sizes)

        self._learn(target, call.batch_size, dim, parts, self._distinguishing_rows(call, target, dim))

    def _learn(
        self,
        target: Target,
        size: int,
        dim: int,
        parts_with: Callable[[list[int]], Sequence[Call]],
        telling: Iterable[list[int]] = (),
    ) -> None:
        """Compare the loss of a few samples of a target with that of its parts.

        `parts_with` returns the parts of some samples of the batch, or () if it cannot. `telling` yields more choices
        of samples, which are made after the usual ones have been compared.
        """
        if self._num_targets >= self._next_compared:
            self._next_compared = min(2 * self._next_compared, self._next_compared + _MOST_STEPS)
        device, reason = self.device or _HOST, ""
        self._moved = [run.on(device) for run in self._runs]
        num_left = len(self._exact or ())
        for chosen in itertools.chain(choices_of_rows(size, sum(self._sizes)), telling):
            few = [moved_to(rows_of(thing, size, chosen, dim), device) for thing in target]
            parts = parts_with(chosen)
            for changed in ignoring(few) if self._num_targets == 1 else [few]:
                reason = self._narrow(tuple(changed), self._pieces(changed, dim), parts, dim) or reason
            if self._exact and not self._is_known and self._num_targets == 1:
                self._narrow_by_special_values(few, parts, dim)
            if self.alternatives:
                self._narrow_by_artificial_labels(few, parts, dim)
        self._moved = []
        if reason and self._is_known:
            check_own_weight(self._loss, size)
        self._conclude(reason)
        self._num_fruitless = self._num_fruitless + 1 if len(self._exact or ()) == num_left else 0
        is_on_gpu = any(tensor.is_cuda for tensor in flatten(target)[0])
        if is_on_gpu and self._num_targets >= _MOST_ON_GPU and not self.alternatives:
            self.is_settled, self._runs = True, []

    def _pieces(self, target: Sequence[Any], dim: int) -> list[Target]:
        columns = [cut_structure(thing, sum(self._sizes), self._sizes, dim) for thing in target]
        return list(zip(*columns, strict=True)) or [()] * len(self._sizes)

    # ---- weights that no target has distinguished yet

    @property
    def alternatives(self) -> list[Any]:
        """The weights, except the one in use, under which all targets so far were exact too."""
        return [] if self.is_settled or self._over_batch else (self._exact or [])[1:]

    def must_compare(self, pieces: Batch, targets: Sequence[Target]) -> bool:
        """Return whether the remaining weights differ for a batch, so that its target must be compared.

        For example, a mask that left out nothing so far leaves out something in this batch. The answer is always False
        for targets on a GPU, since the host would wait at each step. These targets are compared only when they are
        due, for as long as there are alternatives.
        """
        alternatives = self.alternatives
        if not alternatives or any(tensor.is_cuda for tensor in flatten(targets)[0]):
            return False

        def shares(choice: Any) -> list[float] | None:  # noqa: ANN401
            labels = [target[0] if target else None for target in targets]
            if isinstance(choice, CountRule) and choice.name:
                labels = [inputs[choice.name] for inputs in pieces.inputs]
            return shares_with(choice, pieces.sizes, labels)

        def differ(one: list[float] | None, other: list[float] | None) -> bool:
            if one is None or other is None:
                return one is not other
            return not all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(one, other, strict=True))

        first = shares(self.weight)
        return self._num_fruitless < _MOST_FRUITLESS and any(differ(shares(rival), first) for rival in alternatives)

    def _distinguishing_rows(self, call: Call, target: Target, dim: int) -> Iterator[list[int]]:
        """Yield choices of samples that distinguish alternatives: those that count most or least under a weight."""
        size = call.batch_size
        if not self.alternatives or size > _MOST_COUNTED:
            return
        alone = parts_of(call, [1] * size)
        columns = [cut_structure(thing, size, [1] * size, dim) for thing in target]
        targets = list(zip(*columns, strict=True)) or [()] * size
        for choice in self._exact or ():
            if not isinstance(choice, CountRule) or not (choice.name or target):
                continue
            plain = [
                part.tensors[part.names.index(choice.name)] if choice.name else own[0]
                for part, own in zip(alone, targets, strict=True)
            ]
            counts = [float(choice.count(label)) for label in plain]
            order = sorted(range(size), key=counts.__getitem__)
            first = self._sizes[0]
            ends = [row for pair in zip(reversed(order), order, strict=True) for row in pair]
            # in the first part, only those that count least; only those that count most; both in turn
            for rows in (
                [*order[:first], *(order[-1 - number % size] for number in range(sum(self._sizes) - first))],
                [*order[-first:], *(order[number % size] for number in range(sum(self._sizes) - first))],
                [ends[number % size] for number in range(sum(self._sizes))],
            ):
                if not self.alternatives:  # earlier choices were enough
                    return
                yield rows

    def _narrow_by_artificial_labels(self, few: Sequence[Any], parts: Sequence[Call], dim: int) -> None:
        """Distinguish alternatives by artificial labels; labels that fit no weight are ignored."""
        for made in artificial_labels(few):
            with contextlib.suppress(UsageError):
                self._narrow(tuple(made), self._pieces(made, dim), parts, dim)

    def _narrow_by_special_values(self, few: Sequence[Any], parts: Sequence[Call], dim: int) -> None:
        """Distinguish alternatives by values of later targets, which a loss may refuse; raise if no weight is left."""
        for words, changed in special_values(few, self._sizes[0], sum(self._sizes)):
            before = self._exact
            try:
                self._narrow(tuple(changed), self._pieces(changed, dim), parts, dim)
            except UsageError as error:
                self._exact = before
                raise UsageError(
                    f"the loss adds up for this target, but not for one with {words}: it leaves out or weights samples "
                    f"depending on their target, which micro-batches cannot reproduce. {_OVER}; weight= returns the "
                    f"amount that a micro-batch's loss averages over. {_CHECK_OFF}"
                ) from error

    def compare_split_target(self, target: Target, size: int, parts: Sequence[Call], pieces: Sequence[Target]) -> None:
        """Find the quantity from the target of a batch that the user has split.

        Raises:
            UsageError: if the losses of micro-batches cannot add up to that of the batch.
        """
        if callable(self._given):  # it takes whole micro-batches, so single rows of a target do not suffice
            if [part.batch_size for part in parts] == self._split_sizes:
                device = self.device or _HOST
                moved = [tuple(moved_to(thing, device) for thing in piece) for piece in pieces]
                self._conclude(self._narrow(tuple(moved_to(thing, device) for thing in target), moved, parts, 0))
            return
        self._learn(target, size, 0, lambda _: ())

    def _conclude(self, reason: str) -> None:
        """Set the weight that was found, or store the reason why there is none."""
        if self._is_known:  # a known loss is compared at most once, and keeps its weight
            self.is_settled, self._runs = True, []
            return
        if self._exact is None and self._num_targets == 1:
            self._failure_reason = reason
        if self._exact:
            self.weight = None if self._over_batch else self._exact[0]

    def _narrow(self, target: Target, pieces: Sequence[Target], parts: Sequence[Call], dim: int) -> str:
        """Keep the weights that are exact here too; raise if none is left. Return why a target cannot be compared."""
        assert self._loss is not None
        deterministic = Deterministic()
        runs, targets = self._moved or [run.on(self.device or _HOST) for run in self._runs], [target, *pieces]
        if self._over_batch:
            joined = join_results([run.tensors for run in runs[1:]], self._sizes, dim)
            runs, targets = [runs[0], replace(runs[0], tensors=joined)], [target, target]
        scored = score_losses(self._loss, runs, targets, deterministic)
        if scored == CHANGES and not self._over_batch:
            raise UsageError(
                "the loss changes with each call (a running average, a count of calls), and every micro-batch is a "
                f"call. micro_batches=1 or loss_over='batch' calls it once per step. {_CHECK_OFF}"
            )
        if isinstance(scored, str):
            return scored
        losses = [one.loss for one in scored]
        if self._over_batch:
            off = {"batch": distance_of([1.0], scored, dim=dim, sizes=[sum(self._sizes)])}
            if not fitting_weights(off, scored[0].dtypes):
                raise UsageError(_OVER_BATCH)
            self._exact = ["batch"]
            return ""
        tensors = flatten(target, apart=True)[0]
        names = label_names(parts[0]) if parts else []
        choices = self._choices(names, tensors, deterministic.left_out) if self._exact is None else self._exact
        if callable(self._given) and self._shares(self._given, parts, pieces) is None:
            return "weight= returns 0 for all its samples, or an invalid number"
        off = {
            choice: distance_of(self._shares(choice, parts, pieces), scored, dim=dim, sizes=self._sizes)
            for choice in choices
        }
        now = fitting_weights(off, scored[0].dtypes)
        if not now:
            raise self._coupled(losses, broadcast_of(runs[0], target) if self._is_known else "")
        if not self._is_known and not self._is_probed:
            self._is_probed = True
            self._probe({choice: self._shares(choice, parts, pieces) for choice in now}, runs, targets, dim)
        self._exact = now
        if isinstance(now[0], CountRule) and not now[0].name and not self._is_compiled and not self._is_known:
            self.is_summable = is_own_sum(self._loss, runs, targets, now[0])
        return ""

    def _probe(
        self, shares: Mapping[Any, list[float] | None], runs: Sequence[Run], targets: Sequence[Target], dim: int
    ) -> None:
        """Try the loss on outputs that the model may return later; raise if the parts add up under none of the weights.

        Probes do not choose between weights, because their number depends on the time and may differ between processes.
        `shares` holds, for each weight, how much the loss of each part counts.
        """
        assert self._loss is not None
        for scored in probes(self._loss, runs, targets, sizes=self._sizes, dim=dim):
            most = Distance(*(probe_tolerance(dtype) for dtype in scored[0].dtypes))
            off = [distance_of(one, scored, dim=dim, sizes=self._sizes) for one in shares.values()]
            if not any(one.is_within(most) for one in off):
                raise UsageError(f"{_LEAVES_OUT}: {self._facts([one.loss for one in scored])}. {_OVER}. {_CHECK_OFF}")

    # ---- messages

    def _facts(self, losses: Sequence[torch.Tensor]) -> str:
        whole, *parts = (float(loss) for loss in losses)
        count = sum(self._sizes)
        by_samples = sum(size * part for size, part in zip(self._sizes, parts, strict=True)) / count
        return f"the loss of {count} samples is {whole:.6g}, the mean over two parts of them is {by_samples:.6g}"

    def _coupled(self, losses: Sequence[torch.Tensor], hint: str = "") -> UsageError:
        facts = self._facts(losses)
        if self._given is not None:
            return UsageError(
                f"the losses of micro-batches do not add up to that of the batch under weight=: {facts}. {_CHECK_OFF}"
            )
        others = (
            "weight= returns the amount that a micro-batch's loss averages over; micro_batches=1 is exact for any loss"
        )
        if self._loss is not None:
            return UsageError(f"{_COUPLED}: {facts}.{hint} {_OVER}; {others}. {_CHECK_OFF}")
        return OnlyWholeError(
            f"{_COUPLED}: {facts}. The model computes its loss itself: let it return the outputs, and pass loss= and "
            f"loss_over='batch'; {others}. {_CHECK_OFF}"
        )

    def _refusal(self, model: nn.Module, call: Call, facts: str) -> UsageError:
        option = option_for(model, call)
        kind = UsageError if option else OnlyWholeError
        advice = option or advice_for(call)
        return kind(
            f"micro-batches would not compute the same result as the whole batch: {facts}; {advice}. {_CHECK_OFF}"
        )


_INNER_TERM = (
    "The model's own loss has a term that couples samples, as the load-balancing loss of a mixture of experts does: "
    "turn it off (config.output_router_logits=False in transformers), or let the model return the outputs and pass "
    "loss= and loss_over='batch', or set micro_batches=1"
)
_CHECK_OFF = "check=False turns this check off"
_OVER = "loss_over='batch' lets the loss see the outputs of all micro-batches at once"
_LEAVES_OUT = (
    "the losses of micro-batches add up to that of the batch for the current outputs of the model, but not once it has "
    "learnt some of the samples: the loss leaves out samples depending on their outputs, as a threshold or the choice "
    "of hard examples does"
)
_COUPLED = (
    "the loss of the batch is not a weighted sum of the losses of its micro-batches; Penstock tried a mean over "
    "samples, over labels that are not ignored and over masks in the target, and a sum. The loss couples samples, as a "
    "contrastive loss, the root of a mean or a standard deviation does"
)
_OVER_BATCH = (
    "loss_over='batch': the loss of the joined outputs of micro-batches differs from that of the whole batch: the loss "
    f"reads an output that is not one value per sample; let the model return values per sample. {_CHECK_OFF}"
)
