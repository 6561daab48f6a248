"""Trainer builder: make a trainer that is ready to run from a configuration, and record the run in its folder."""

from __future__ import annotations

import json
import os
import platform
import random
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock._version import __version__
from penstock.compile.options import options_of
from penstock.deciding.plan import NAME, Plan
from penstock.devices import cuda
from penstock.devices.kinds import kind_of
from penstock.errors import ScheduleError, UsageError
from penstock.launch.build.data_source import (
    AUTOCAST,
    build_data,
    check_pair,
    count_tokens_of,
    explain_bad_batches,
    first_item,
)
from penstock.launch.build.named_parts import (
    build_loss,
    build_model,
    build_rate,
    build_weight,
    call,
    optimizer_maker,
    weights_of,
)
from penstock.launch.config.config_checks import node_counts
from penstock.launch.config.config_writer import to_toml
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.planned.placement import share_of_threads
from penstock.runtime.lanes.lane_group import world_size
from penstock.training.callbacks.callback import Callback
from penstock.training.callbacks.journal import Journal
from penstock.training.callbacks.tensorboard import TensorBoard
from penstock.training.stepper import ItemReader
from penstock.training.trainer import Trainer

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress
    from penstock.launch.config.config import Config
    from penstock.launch.config.config_reader import LoadedConfig

_BUILD_SECONDS = 600.0  # minimum timeout while the first lane measures and cuts, and the others wait
_OF_A_MACHINE = {"nproc", "node_rank", "rdzv_endpoint", "rdzv_conf", "max_restarts", "spares", "log_dir"}


@dataclass(frozen=True)
class Parts:
    """The parts that a configuration names: the model, its batches, and an example batch."""

    model: Any
    example: Any
    data: Iterable[Any]
    validation: Iterable[Any] | None


def build_parts(config: Config) -> Parts:
    """Return the model and the data."""
    _seed_generators(config.seed)
    options_of(config.compile)  # check the options before the expensive parts
    model, example = build_model(config)
    if config.precision == "fp64":
        for module in model if isinstance(model, list) else [model]:
            module.double()
    data, validation = build_data(config)
    if example is None:
        item, data = first_item(data)
        has_target = build_loss(config) is not None
        if has_target:
            check_pair(config, item)
        example = ItemReader(None, has_target=has_target).call(item)[0]
        if isinstance(example, list):  # a DataLoader yields several tensors as a list
            example = tuple(example)
    return Parts(model, example, data, validation)


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % (1 << 32))


def build_trainer(
    given: LoadedConfig,
    stack: ExitStack,
    *,
    callbacks: Iterable[Callback] = (),
    progress: Progress | None = None,
    is_again: bool = False,
) -> Trainer:
    """Return a trainer that is ready to run.

    Args:
        given: the configuration and the sources of its values.
        stack: closes the pipeline.
        callbacks: callbacks in addition to those of the configuration.
        progress: called with the current activity.
        is_again: this is a restart after lost processes: resume from the newest checkpoint, even with resume="never".

    Raises:
        UsageError: if the configuration cannot work.
    """
    config = given.config
    parts = build_parts(config)
    make = optimizer_maker(config)
    scaler = _scaler(config)
    with explain_bad_batches(config, parts.model, parts.example):
        pipe = stack.enter_context(_pipeline(config, parts, make, scaler, progress, is_again=is_again))
    _check_same(config, pipe)
    optimizer = None if pipe.optimizers else make(pipe.parameters())
    rates = [build_rate(config, one) for one in (list(pipe.optimizers.values()) if optimizer is None else [optimizer])]
    return Trainer(
        pipe,
        optimizer,
        parts.data,
        steps=config.steps,
        folder=config.folder,
        scheduler=[rate for rate in rates if rate is not None],
        scaler=scaler,
        validation=parts.validation,
        validate_every=config.validate_every,
        clip=config.clip,
        accumulate=config.accumulate,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        resume="auto" if is_again and config.resume == "never" else config.resume,
        log_every=config.log_every,
        record_every=config.record_every,
        resume_data=config.resume_data,
        on_nan=config.on_nan,
        on_oom=config.on_oom,
        max_seconds=config.max_seconds,
        callbacks=[_RunRecord(given), Journal(), *_own_callbacks(config), *callbacks],
        view=False,  # the command chooses the view
        count_tokens=count_tokens_of(parts.example),
    )


def _check_same(config: Config, pipe: Pipeline) -> None:
    """Raise in all processes if their configurations differ, since machines may have different files."""
    everyone = pipe.internals.gather(config.model_dump(mode="json", exclude=_OF_A_MACHINE))
    different = [
        f"{name}: " + ", ".join(f"{given[name]!r} (lane {lane})" for lane, given in enumerate(everyone))
        for name in everyone[0]
        if any(given[name] != everyone[0][name] for given in everyone)
    ]
    if different:
        raise UsageError("the processes have different configurations: " + "; ".join(different))


def _pipeline(
    config: Config, parts: Parts, make: Any, scaler: Any, progress: Progress | None, *, is_again: bool,  # noqa: ANN401
) -> Pipeline:  # fmt: skip
    from penstock.schedules import describe, names

    given = None if config.plan is None else Plan.from_json(config.plan)
    schedule = config.schedule_name if given is None else config.schedule
    name = given.schedule.name if given is not None else config.schedule_name
    is_file = name.lower().endswith(".csv")
    has_updates = not is_file and (given is None or name in names()) and not describe(name).trains_exactly
    lanes = None if (is_file or given is not None) and world_size() == 1 and config.lanes is None else lanes_of(config)
    pipe = Pipeline(
        parts.model,
        example=parts.example,
        loss=build_loss(config),
        weight=build_weight(config),
        weights=weights_of(config),
        loss_over=config.loss_over,
        batch_dim=config.batch_dim,
        whole=config.whole,
        micro_batches=config.micro_batches,
        schedule=schedule,
        devices=_devices(config, lanes),
        lanes=lanes,
        stages_per_lane=config.stages_per_lane,
        cuts=config.cuts,
        keep=config.keep,  # type: ignore[arg-type]  # checked with the configuration
        autocast=AUTOCAST.get(config.precision),
        scaler=scaler,
        optimizer=make if has_updates else None,
        memory_limit=config.memory_limit,
        deferred_batch_norm=config.deferred_batch_norm,
        capture_path=config.capture_path,
        check=config.check,
        graphs=config.graphs,
        compile=config.compile,
        timeout=max(config.timeout, _BUILD_SECONDS),
        plan=given if given is not None else config.folder if is_again or config.resume != "never" else None,
        progress=progress,
    )
    pipe.timeout = config.timeout
    return pipe


def lanes_of(config: Config) -> int | None:
    """Return the number of lanes: the current number of processes, or the requested number."""
    processes = world_size()
    wanted = (config.nproc or 1) * node_counts(config)[1]
    if processes > 1 or (wanted > 1 and "RANK" in os.environ):
        return processes
    if config.lanes is None and isinstance(config.devices, list):
        return len(config.devices)
    return config.lanes if config.lanes is not None or wanted == 1 else wanted


def threads_of(config: Config, lanes: int) -> int | None:
    """Return the number of torch threads in each lane on the CPU; None for GPUs."""
    is_cpu = not cuda.has_gpu()
    if config.devices is not None:
        listed = config.devices if isinstance(config.devices, list) else [config.devices]
        is_cpu = all(str(device).startswith("cpu") for device in listed)
    return share_of_threads(lanes) if is_cpu and lanes > 1 else None


def _devices(config: Config, lanes: int | None) -> Any:  # noqa: ANN401 - as the pipeline takes them
    """Return the requested devices; if lanes were lost, those of the remaining lanes."""
    if isinstance(config.devices, list) and lanes is not None and lanes < len(config.devices):
        return config.devices[:lanes]
    return config.devices


def _scaler(config: Config) -> torch.amp.GradScaler | None:
    if config.precision != "fp16":
        return None
    listed = [config.devices] if isinstance(config.devices, str) else config.devices or []
    kinds = [torch.device(name).type for name in listed] or ["cuda" if cuda.has_gpu() else "cpu"]
    return torch.amp.GradScaler(kinds[0])


def _own_callbacks(config: Config) -> list[Callback]:
    found: list[Callback] = [TensorBoard()] if config.tensorboard else []
    for name in config.callbacks:
        made = call("callbacks", name, {})
        if not isinstance(made, Callback):
            raise UsageError(f"callbacks: {name} returned {type(made).__name__}, not a penstock.Callback")
        found.append(made)
    return found


class _RunRecord(Callback):
    """Writes configuration, plan and schedule to the run folder, and of the environment only versions and devices."""

    def __init__(self, given: LoadedConfig) -> None:
        self._given = given

    def on_train_begin(self, trainer: Trainer) -> None:
        """Write the files, now that the training has locked the folder."""
        folder, pipe = trainer.folder, trainer.pipe
        if not trainer.is_first:
            return
        folder.write("config.toml", to_toml(self._given))
        folder.write("environment.json", json.dumps(environment(pipe), indent=2) + "\n")
        folder.write(NAME, pipe.plan.to_json())
        with suppress(ScheduleError):  # torch's format cannot express all schedules
            pipe.schedule.to_csv(folder.path / "schedule.csv")


def environment(pipe: Pipeline) -> dict[str, Any]:
    """Return versions and devices, and nothing that could be a secret."""
    import numpy as np

    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "processes": world_size(),
        "devices": [f"{device}: {kind_of(device).name(device)}" for device in pipe.devices],
    }
