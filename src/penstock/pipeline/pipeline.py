"""Pipeline: a model cut into stages, and the lanes that train it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import nn

from penstock.compile.options import Compile, compiled, options_of
from penstock.deciding.defaults import KEEP, default_schedule
from penstock.deciding.plan import Plan, check_free, plan_to_run
from penstock.errors import UsageError
from penstock.model.capture.capture import Captured, plain_module
from penstock.model.example import BatchLayout
from penstock.model.structure import rebuild
from penstock.pipeline.batch_reader import BatchReader
from penstock.pipeline.comparison import Comparison, compare
from penstock.pipeline.exactness.exactness import Exactness
from penstock.pipeline.executor_setup import ExecutorSetup
from penstock.pipeline.gradient_mode import without_gradients
from penstock.pipeline.graph_steps import GraphsOption, GraphSteps, trained_parameters
from penstock.pipeline.internals import Internals
from penstock.pipeline.model_interface import ModelInterface
from penstock.pipeline.planned.arguments import (
    LossOver,
    check_loss_over,
    check_seconds,
    check_switches,
    check_words,
    warn_of_cache,
)
from penstock.pipeline.planned.placement import autocast_of, check_devices, choose_lanes, threads_per_lane
from penstock.pipeline.planned.planned_model import Model, Request, module_of, plan_model
from penstock.pipeline.splitting.custom_split import Split
from penstock.pipeline.splitting.packed_images import found_split
from penstock.pipeline.step_recording import Recording
from penstock.pipeline.step_runner import StepRunner
from penstock.pipeline.weights import Weights
from penstock.report.units import show_bytes
from penstock.runtime.exclusive_use import ExclusiveUse
from penstock.runtime.lanes.lane_group import LaneGroup, make_lane_group
from penstock.runtime.losses import (
    LossFunction,
    Weight,
    check_loss,
    without_backward,
)
from penstock.runtime.micro_batches import join_results, join_rows
from penstock.runtime.step import Mode
from penstock.schedule.keep_policies import CHOSEN_BY_NODE, Keep, KeepRequest, check_keep, of_stages
from penstock.schedule.schedule import Schedule

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.memory_limits import Limit
    from penstock.runtime.action_watch import Watch

__all__ = ["Pipeline"]

_NOTHING = object()  # no target was given, which is not the target None


class Pipeline(ModelInterface):
    """A model that is trained in stages, by lanes that work at the same time.

    In one process a lane is a worker thread; under torchrun it is a process. Loss and gradients are those of the
    model on the whole batch, whatever the schedule.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> batch, target = torch.ones(6, 4), torch.zeros(6, 1)
    >>> with Pipeline(model, example=batch, loss=nn.MSELoss(), lanes=2, micro_batches=3, cuts=[2]) as pipe:
    ...     loss = pipe.step(batch, target)
    >>> bool((loss - nn.functional.mse_loss(model(batch), target)).abs() < 1e-6)
    True

    Args:
        model: any module, unchanged; or a list of stage modules, each called with what the one before returns; or what
            `penstock.model.capture.capture.capture` returned.
        example: how the model is called with a batch: a tensor, a tuple of arguments or a dict of keyword arguments.
        loss: `loss(output, target)`; None where the model returns its loss, or an output with `.loss`.
        micro_batches: so many a step; by default four a lane, as far as the example has samples.
        schedule: a name, a Schedule, a CSV file, or "auto"; by default 1f1b, and zb_gpipe for a loss over the batch.
        devices: one a lane, in one process; by default all GPUs, else lanes of the CPU.
        lanes: how many; by default as devices or processes, else 2.
        stages_per_lane: for schedules that leave it open.
        cuts: where cuts must lie: numbers of nodes, or nodes or modules that they lie before; the rest is chosen.
        keep: what stages do with saved values: "hold", "recompute", "except_last" or "offload"; one, or one a stage.
            "fit" recomputes only the nodes that must be, for lanes to stay within `memory_limit`.
        weight: what the loss averages over in a micro-batch, `weight(batch, target)`; "sum" for a loss that adds up.
            By default it is read off torch's own losses, and found out by trial for others.
        loss_over: what one call of the loss sees: a "micro_batch", or the "batch": the outputs of all micro-batches at
            once, for losses that couple samples. The outputs of the whole batch are then held together.
        batch_dim: the dimension of the batch: one number, or a dict with one per argument.
        whole: names of arguments that every micro-batch gets whole.
        split: for batches that are no plain stacks: `split(batch, target, count)` returns at most `count` pairs
            (batch, target), one per micro-batch. The model is then captured by replay, and loss weights by samples
            count the first batch dimension of each.
        check: compare a few samples of the example, whole and in parts, and refuse a model or a loss whose
            micro-batches do not add up to the batch.
        autocast: a dtype to run forwards in; by default as the autocast around `step`.
        scaler: a torch.amp.GradScaler for losses of 16 bits; `step` scales by it and all lanes see the same overflow.
        optimizer: for schedules that update weights within the step: makes an optimizer of a stage's parameters.
        deferred_batch_norm: update running statistics once a step, as the whole batch would.
        memory_limit: bytes each lane has for weights, gradients, optimizer state and saved values, as 16e9 or "16GiB";
            one value for all lanes or a list.
        cluster: speeds and links of the lanes, for the choice of cuts.
        profile: one that was made before, or its file: nothing is measured.
        plan: a `Plan`, or the JSON file of one, to run: nothing is measured or decided anew. Or a run folder: its plan
            is run if it was made for the same model and settings, and nothing is measured; else a warning says what
            has changed.
        analytic: rates of a device, or the name of one: count instead of measure.
        capture_path: "direct", "export" or "replay" to have one of these.
        transport: how processes hand each other values: "shared" memory, "gloo" or "nccl"; "auto" takes the quickest
            that works where they are.
        graphs: run training steps as CUDA graphs: True, False, or "auto" for wherever that works.
        compile: let Inductor compile the stages and the loss; a dict of its options to compile with these.
        timeout: seconds that a lane waits for a value before it says that the other hangs.
        progress: is told what is being done, how much is done, and of how much.

    Raises:
        CaptureError: when the model cannot be captured; says where it stopped, and what to do.
        PartitionError: when no cuts are as asked for, or none fit the memory.
        UsageError: for arguments that cannot be right.
        ScheduleError: for a schedule that does not exist or cannot run.
    """

    def __init__(
        self,
        model: Model,
        *,
        example: object,
        loss: LossFunction | None = None,
        micro_batches: int | None = None,
        schedule: str | Schedule | PathLike[str] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
        lanes: int | None = None,
        stages_per_lane: int | None = None,
        cuts: Sequence[int | str] = (),
        keep: KeepRequest | Sequence[Keep] = KEEP,
        weight: Weight = None,
        loss_over: LossOver = "micro_batch",
        batch_dim: int | Mapping[str, int] = 0,
        whole: Sequence[str] = (),
        split: Split | None = None,
        check: bool = True,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        deferred_batch_norm: bool = False,
        memory_limit: Limit | None = None,
        cluster: Cluster | None = None,
        profile: Profile | str | PathLike[str] | None = None,
        plan: Plan | str | PathLike[str] | None = None,
        analytic: Rates | str | None = None,
        capture_path: str = "auto",
        transport: str = "auto",
        graphs: GraphsOption = "auto",
        compile: Compile = False,  # noqa: A002 - as torch calls it
        timeout: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        module, captured = module_of(model)
        given = plan_to_run(plan)
        if given is not None:
            check_free(
                given,
                {
                    "schedule": schedule, "lanes": lanes, "micro_batches": micro_batches,
                    "stages_per_lane": stages_per_lane, "cuts": cuts or None, "keep": None if keep == KEEP else keep,
                    "memory_limit": memory_limit, "cluster": cluster, "profile": profile, "analytic": analytic,
                    "capture_path": None if capture_path == "auto" else capture_path,
                },
            )  # fmt: skip
            schedule, cuts, capture_path = given.schedule, given.cuts, given.capture_path
            keep = cast("Keep", given.keep)
            memory_limit = given.memory_limit
        elif schedule is None:
            schedule = default_schedule(loss_over)
        num_lanes = choose_lanes(lanes, devices, schedule)
        self.devices = check_devices(devices, num_lanes)
        check_loss(loss, weight)
        check_words(module, keep, optimizer, memory_limit)
        check_switches(graphs=graphs, autocast=autocast, scaler=scaler, deferred_batch_norm=deferred_batch_norm)
        options = options_of(compile)
        if split is None and isinstance(module, nn.Module):
            split = found_split(example, module)
        request = Request(
            module, example, schedule, num_lanes, micro_batches, stages_per_lane,
            (cuts,) if isinstance(cuts, (str, int)) else tuple(cuts), keep if isinstance(keep, str) else tuple(keep),
            memory_limit, cluster, profile, analytic, capture_path, self.devices[0], progress,
            threads_per_lane(self.devices), BatchLayout(batch_dim, whole), split,
            plan if given is None else given, captured,
        )  # fmt: skip
        self._lane_group: LaneGroup = make_lane_group(
            self.devices, timeout_seconds=check_seconds(timeout), num_threads=threads_per_lane(self.devices),
            transport=transport,
        )  # fmt: skip
        weakref.finalize(self, self._lane_group.close)
        self._use = ExclusiveUse()
        exactness = Exactness(loss, weight, over_batch=loss_over == "batch", is_compiled=options is not None)

        def check_exactness(captured: Captured, schedule: Schedule) -> None:
            check_loss_over(loss_over, schedule, loss=loss, weight=weight)
            if check and schedule.num_mbs > 1:
                exactness.check(captured.split(()), captured.model, example=example, split=split)

        self._planned = plan_model(request, check_exactness, self._lane_group)
        self.schedule, self.cuts = self.plan.schedule, self.plan.cuts
        if keep == CHOSEN_BY_NODE and self.schedule.versions is not None:
            raise UsageError(f'keep: "fit" does not go with {self.schedule.name}, whose weights change within the step')
        self._chains = [self._planned.split() for _ in self.schedule.ways]
        for chain in self._chains:
            chain.compile_stages(options)
        self._cast = partial(autocast_of, autocast, self.devices[0])
        self._weights = Weights(
            self._chains, self.schedule, self.devices, self._lane_group, make_optimizer=optimizer,
            is_scaled=scaler is not None,
        )  # fmt: skip
        self._lane_group.give_streams(self._weights.lanes_sharing_tensors())
        setup = ExecutorSetup(
            self._chains,
            self.schedule,
            check_keep(of_stages(keep), self.schedule.num_stages),
            self.devices,
            self._lane_group.transports,
            self._lane_group.streams,
            self._lane_group.rows,
            optimizers=self._weights.optimizers,
            defers_batch_norm=deferred_batch_norm,
            is_compiled=options is not None,
        )
        exactness.device = self.devices[self.schedule.ways[0][-1]]
        self._steps = StepRunner(
            self._chains[0], setup, self._lane_group, self._weights,
            GraphSteps(
                graphs,
                setup,
                self._lane_group,
                parameters=trained_parameters(self._weights.parameters, loss),
                progress=progress,
            ),
            BatchReader(self._chains[0], self.schedule.num_mbs, loss=loss, exactness=exactness, split=split),
            compiled(loss, options), scaler, loss_over == "batch",
        )  # fmt: skip
        self._timeout, self._has_looked_for_caches = timeout, False
        self.training = True
        self._followed = plain_module(module) if isinstance(module, nn.Module) else module[0]
        self._followed_mode = self._followed.training
        self.train(self._followed_mode)

    @overload
    def step(self, batch: object, target: object = ..., *, metrics: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def step(
        self, batch: object, target: object = ..., *, metrics: Literal[True]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...

    def step(
        self, batch: object, target: object = _NOTHING, *, metrics: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run forward and backward of all micro-batches; return the loss of the batch.

        Gradients are added to those that are there, as `loss.backward()` would.

        Args:
            batch: as the example.
            target: what the loss is called with behind the output.
            metrics: also return the single numbers that the loss function returns beside the loss, by name. Those of
                the micro-batches are averaged, or added up, as their losses are.

        Raises:
            UsageError: when the batch is not like the example; nothing was run.
            LaneError: when an action failed.
        """
        with self._use:
            self._follow_model()
            if not self.training:
                raise UsageError("step() trains, and the pipeline is in evaluation: call train(), or evaluate()")
            ready = self._steps.read(batch, _given(target), adds_gradients=True)
            step = self._steps.begin(ready, Mode(True, True, self._cast()), given=(batch, *_given(target)))
            self._steps.train(step, batch)
            loss = without_backward(self._steps.total(step, ready))
            return (loss, self._steps.total_metrics(step, ready)) if metrics else loss

    @overload
    def evaluate(self, batch: object, target: object = ..., *, metrics: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def evaluate(
        self, batch: object, target: object = ..., *, metrics: Literal[True]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...

    @without_gradients
    def evaluate(
        self, batch: object, target: object = _NOTHING, *, metrics: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch in evaluation, as `step` does; gradients and the mode stay as they are."""
        with self._use:
            with self._in_mode(False):
                ready = self._steps.read(batch, _given(target))
                step = self._steps.begin(ready, Mode(False, False, self._cast()), given=(batch, *_given(target)))
                self._steps.run(step)
            loss = self._steps.total(step, ready)
            return (loss, self._steps.total_metrics(step, ready)) if metrics else loss

    @without_gradients
    def forward(self, batch: object, *, gather: str = "all") -> Any:  # noqa: ANN401 - as the model
        """Return what the model returns for a batch, without gradients, in the mode that the pipeline is in.

        Caches of keys and values are left out: a pipeline does not generate. A warning says so once.

        Args:
            batch: as the example.
            gather: under torchrun, who gets the outputs: "all" lanes, or the "last" only (others get None).
        """
        with self._use:
            self._follow_model()
            if gather not in ("all", "last"):
                raise UsageError(f"gather: {gather!r} is not one of all, last")
            ready = self._steps.read(batch, None)
            outputs: dict[int, list[Any]] = {}
            step = self._steps.begin(ready, Mode(self.training, False, self._cast()), given=(batch,), outputs=outputs)
            self._steps.run(step)
            made = self._lane_group.values.outputs(outputs, ready.batch.num_mbs, self.schedule, to_all=gather == "all")
            if made is None:
                return None
            results, sizes = [made[mb] for mb in range(ready.batch.num_mbs)], ready.batch.sizes
            with torch.autocast(self.devices[0].type, enabled=False):  # results keep their types
                if self._steps.reader.is_split and len(results) > 1:
                    joined = join_rows(results, sizes)
                else:
                    joined = join_results(results, sizes, self._chains[0].example.batch_dim)
            output = rebuild(self._chains[0].results(self.training).template(), joined)
            if not self._has_looked_for_caches:
                self._has_looked_for_caches = True
                warn_of_cache(output, self._planned.captured)
            return output

    __call__ = forward

    def _follow_model(self) -> None:
        """Take over the mode of the user's model, where model.train() or model.eval() has changed it."""
        now = self._followed.training
        if now is not self._followed_mode:
            self._followed_mode = now
            self.train(now)

    def train(self, mode: bool = True) -> Pipeline:
        """Put all stages into training, as `model.train()` does for a model that the pipeline was made of."""
        self.training = mode
        for chain in self._chains:
            chain.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put all stages into evaluation."""
        return self.train(False)

    @contextmanager
    def _in_mode(self, training: bool) -> Iterator[None]:
        before = self.training
        self.train(training)
        try:
            yield
        finally:
            self.train(before)

    @property
    def plan(self) -> Plan:
        """How the model is cut and run. `pipe.plan.to_json(path)` writes it, and `Pipeline(..., plan=path)` runs it."""
        plan, found = self._planned.plan, self._planned.explainer.kept
        return plan if found is None or plan.explanation is not None else replace(plan, explanation=found)

    @property
    def internals(self) -> Internals:
        """What checkpoints, faults, feeding and training need of it; see `penstock.pipeline.internals`."""
        return Internals(self)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that run in this process: all of them, or under torchrun one."""
        return self._lane_group.lanes

    @property
    def watch(self) -> Watch | None:
        """What sees every action: see `penstock.runtime.action_watch`."""
        return self._steps.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._steps.watch = watch

    @property
    def timeout(self) -> float:
        """The seconds that a lane waits for a value before it says that the other hangs."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._lane_group.set_timeout(check_seconds(seconds))
        self._timeout = seconds

    @contextmanager
    def record(self, *, memory: bool = False) -> Iterator[Recording]:
        """Measure the steps inside; what is yielded is the timeline of the last of them, once it has run.

        Args:
            memory: also count, after each action, what each lane holds; that makes the step itself slower.
        """
        if self._steps.recording is not None:
            raise UsageError("record() is open already")
        recording = Recording(self.schedule, self._planned.held_bytes, memory=memory)
        self._steps.recording = recording
        try:
            yield recording
        finally:
            self._steps.recording = None

    def num_samples(self, batch: object) -> int:
        """Return the samples of a batch, wherever `batch_dim` says they are."""
        return self._steps.reader.num_samples(batch)

    def check(self, batch: object, target: object = _NOTHING) -> Comparison:
        """Compare a batch in micro-batches with the same batch whole: the loss and every gradient.

        Prints what differs most, and returns it. Dropout is off and batch norm uses its running statistics. Gradients,
        buffers and random states stay as they are. Under torchrun all processes call it, and the first prints.

        Raises:
            UsageError: when the batch is not like the example, or the schedule updates weights within the step.
        """
        found = compare(self, batch, _given(target))
        if 0 in self.lanes:
            sys.stdout.write(f"{found}\n")
        return found

    def explain(self) -> Explanation:
        """Return how the model is cut, what each stage takes and holds, and the predicted step; print it."""
        found = self._planned.explain()
        if not self._steps.loss_over_batch:
            return found
        size, count = int(found.profile.batch_size), self.schedule.num_mbs
        held = sum(found.graph.values[value].bytes_at(size) for value in found.graph.outputs) * count
        note = (
            f"loss over the whole batch: the last lane also holds the outputs of all {count} micro-batches and their "
            f"gradients, {show_bytes(2 * held)} in all, and what the loss itself saves"
        )
        return replace(found, notes=(*found.notes, note))

    def close(self) -> None:
        """Stop the lanes; a pipeline that is left alone does so by itself."""
        self._steps.is_closed = True
        self._lane_group.close()
        self._steps.graphs.forget()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:  # noqa: ANN401 - nothing is returned
        raise UsageError("a pipeline cannot be copied or pickled: it is its lanes; save pipe.state_dict()")

    def __repr__(self) -> str:
        return f"Pipeline({self.schedule!r}, cuts={list(self.cuts)})"


def _given(target: object) -> tuple[Any, ...]:
    return () if target is _NOTHING else (target,)
