"""Config checks: names that must exist and settings that contradict each other. Needs no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import PenstockError, nearest
from penstock.launch.config.config import Config
from penstock.report.units import parse_bytes
from penstock.schedule.keep_policies import CHOSEN_BY_NODE, POLICIES

LR_SCHEDULES = ("constant", "linear", "cosine", "one_cycle")
_BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
_BUILT_IN = {
    "model": ("penstock:gpt",),
    "data": ("penstock:text",),
    "loss": ("penstock:next_token",),
    "validation": ("penstock:text",),
}
_CALLABLE = re.compile(r"(?:[^:]+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_MOST_NAMES = 8  # maximum number of callables of a file in a message

Fault = tuple[str, str]  # a key and its fault


def node_counts(config: Config) -> tuple[int, int]:
    """Return the minimum and the maximum number of machines.

    Raises:
        ValueError: if nnodes is neither a number nor MIN:MAX.
    """
    words = str(config.nnodes).split(":")
    if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
        raise ValueError("must be a number of machines, or MIN:MAX")
    fewest, most = int(words[0]), int(words[-1])
    if not 1 <= fewest <= most:
        raise ValueError("must be 1 or more, and MIN must not exceed MAX")
    return fewest, most


def faults_of(config: Config) -> Iterator[Fault]:
    """Yield all faults with their keys."""
    for key in ("model", "data", "validation", "loss"):
        given = getattr(config, key)
        if isinstance(given, str):
            yield from _name_faults(key, given)
    yield from _batch_faults(config)
    yield from (("callbacks", fault) for one in config.callbacks for fault in _callable_faults(one))
    yield from _model_faults(config)
    yield from _learning_faults(config)
    yield from _schedule_faults(config)
    yield from _folder_faults(config)
    yield from _process_faults(config)


def _name_faults(key: str, given: str) -> Iterator[Fault]:
    if given.startswith("penstock:"):
        if given not in _BUILT_IN[key]:
            yield key, f"{given!r}: Penstock has no such {key}.{nearest(given, _BUILT_IN[key])}"
    elif given.startswith("hf:") and key == "model":
        folder = given.removeprefix("hf:")
        if not (Path(folder).expanduser() / "config.json").is_file():
            yield key, f"{_no_file(f'{folder}/config.json')}; hf: needs a folder that save_pretrained wrote"
    elif ":" in given:
        yield from ((key, fault) for fault in _callable_faults(given))
    elif given.endswith(".py"):
        yield key, f"must be {given}:callable{_callables_in(given)}; given: {given!r}"
    elif key in ("data", "validation"):
        yield key, f"must be package.module:callable or file.py:callable; given: {given!r}"
    elif not given.strip():
        yield key, "is empty"
    elif given.endswith(".json") and key == "model" and not Path(given).is_file():
        yield key, _no_file(given)


def _callable_faults(given: str) -> Iterator[str]:
    if not _CALLABLE.fullmatch(given):
        yield f"must be package.module:callable or file.py:callable; given: {given!r}"
        return
    place = given.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        yield _no_file(place)


def _no_file(place: str) -> str:
    is_whole = Path(place).is_absolute()
    where = "" if is_whole else f" in {Path.cwd()}; paths are relative to the working directory"
    return f"there is no file {place}{where}"


def _callables_in(place: str) -> str:
    """Return the functions and classes of a file as a hint; the file is parsed, not run."""
    try:
        found = ast.parse(Path(place).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in found if isinstance(node, kinds) and not node.name.startswith("_")]
    return f", such as {place}:{names[-1]} (it has {', '.join(names[:_MOST_NAMES])})" if names else ""


def _model_faults(config: Config) -> Iterator[Fault]:
    if isinstance(config.model, dict) and not isinstance(config.model.get("model_type"), str):
        yield "model", 'a table must have model_type, such as model_type = "gpt2"'
    if isinstance(config.model, dict) and config.model_args:
        yield "model_args", "the model is a table; put the settings there"
    is_own = isinstance(config.model, str) and ":" in config.model and not config.model.startswith(("penstock:", "hf:"))
    if config.loss == "auto" and is_own:
        yield "loss", f"set the loss of {config.model}, such as cross_entropy; or model, if the model returns its loss"


def _batch_faults(config: Config) -> Iterator[Fault]:
    """Yield faults of weight, loss_over, batch_dim and whole."""
    if config.weight is not None and config.weight != "sum":
        for fault in _callable_faults(config.weight):
            yield "weight", fault.replace("must be", "must be sum,", 1)
    if config.loss_over == "batch":
        if config.weight is not None:
            yield "weight", "has no effect with loss_over batch; leave it out"
        if config.loss == "model":
            yield "loss_over", "batch needs a loss function: a loss in the model gets one micro-batch only"
    dims = config.batch_dim if isinstance(config.batch_dim, dict) else {}
    for name in config.whole:
        if name in dims:
            yield "whole", f"{name!r} is whole, but batch_dim also names it; leave one of them out"


def _learning_faults(config: Config) -> Iterator[Fault]:
    rate = config.lr_schedule
    if ":" in rate:
        yield from (("lr_schedule", fault) for fault in _callable_faults(rate))
        if config.warmup_steps:
            yield (
                "warmup_steps",
                "has no effect: the lr_schedule is a callable, which does its own warm-up; leave it out",
            )
    elif rate not in LR_SCHEDULES:
        yield "lr_schedule", f"{rate!r} is not one of {', '.join(LR_SCHEDULES)}.{nearest(rate, LR_SCHEDULES)}"
    if config.warmup_steps >= config.steps:
        yield "warmup_steps", f"{config.warmup_steps}, but there are only {config.steps} steps"
    if ":" in config.optimizer:
        yield from (("optimizer", fault) for fault in _callable_faults(config.optimizer))
    for name in ("lr", "weight_decay"):
        if name in config.optimizer_args:
            yield "optimizer_args", f"{name} has its own key: use {name}"
    if config.on_nan == "rewind" and not config.checkpoint_every:
        yield "on_nan", "rewind needs checkpoints: set checkpoint_every"


def _schedule_faults(config: Config) -> Iterator[Fault]:
    from penstock.schedules import describe

    entry = None
    if config.schedule_name.lower().endswith(".csv"):
        if not Path(config.schedule_name).is_file():
            yield "schedule", _no_file(config.schedule_name)
    else:
        try:
            entry = describe(config.schedule_name)
        except PenstockError as error:
            yield "schedule", str(error)
    if entry is not None and not entry.trains_exactly:
        for name, given in (("clip", config.clip), ("precision", config.precision == "fp16" or None)):
            if given is not None:
                yield name, f"{config.schedule_name} updates weights within the step; leave {name} out"
        if config.accumulate > 1:
            yield "accumulate", f"{config.schedule_name} updates weights within the step; leave it out"
    yield from _memory_faults(config)


def _memory_faults(config: Config) -> Iterator[Fault]:
    keeps = [config.keep] if isinstance(config.keep, str) else config.keep
    for keep in keeps:
        if keep not in POLICIES:
            yield "keep", f"{keep!r} is not one of {', '.join(POLICIES)}.{nearest(keep, tuple(POLICIES))}"
    if CHOSEN_BY_NODE in keeps and not isinstance(config.keep, str):
        yield "keep", "fit applies to all stages, so it cannot be in a list"
    if CHOSEN_BY_NODE in keeps and config.memory_limit is None:
        yield "keep", "fit needs memory_limit"
    limits = config.memory_limit if isinstance(config.memory_limit, list) else [config.memory_limit]
    for limit in limits:
        if isinstance(limit, str):
            try:
                is_fine = parse_bytes(limit) > 0
            except ValueError:
                is_fine = False
            if not is_fine:
                yield "memory_limit", f"{limit!r} is not a number of bytes, such as 16GiB"


def _folder_faults(config: Config) -> Iterator[Fault]:
    if not config.folder.strip():
        yield "folder", "is empty"
    elif Path(config.folder).exists() and not Path(config.folder).is_dir():
        yield "folder", f"{config.folder} is a file, not a folder"
    if not config.resume.strip():
        yield "resume", "must be auto, never, or the folder of a checkpoint"
    elif config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        words = nearest(config.resume, ("auto", "never"))
        yield "resume", f"{config.resume!r} is not auto, never or an existing folder.{words}"


def _process_faults(config: Config) -> Iterator[Fault]:
    try:
        fewest, most = node_counts(config)
    except ValueError as error:
        yield "nnodes", f"{error}; given: {config.nnodes!r}"
        return
    processes = (config.nproc or 1) * most
    counts = {"lanes": config.lanes}
    if config.nproc is not None or most > 1:
        counts["nproc"] = processes
    if isinstance(config.devices, list):
        counts["devices"] = len(config.devices)
        if not config.devices:
            yield "devices", "is empty"
    known = {name: count for name, count in counts.items() if count is not None}
    if processes == 1 and known.get("lanes", 1) != 1:
        known.pop("nproc", None)  # one process: its lanes are threads
    if len(set(known.values())) > 1:
        told = ", ".join(f"{name}: {count}" for name, count in known.items())
        what = "each process is a lane" if "nproc" in known else "each lane has a device"
        yield next(reversed(known)), f"{what}, but these numbers differ: {told}; set one of them"
    yield from _rendezvous_faults(config, fewest, most)


def _rendezvous_faults(config: Config, fewest: int, most: int) -> Iterator[Fault]:
    if config.rdzv_backend not in _BACKENDS:
        words = nearest(config.rdzv_backend, _BACKENDS)
        yield "rdzv_backend", f"{config.rdzv_backend!r} is not one of {', '.join(_BACKENDS)}.{words}"
    if most > 1 and config.rdzv_endpoint is None:
        yield "rdzv_endpoint", f"{most} machines need a rendezvous: set HOST:PORT of one of them"
    if config.rdzv_endpoint is not None and not re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(:\d{1,5})?", config.rdzv_endpoint):
        yield "rdzv_endpoint", f"must be HOST:PORT; given: {config.rdzv_endpoint!r}"
    if most > 1 and config.rdzv_id is None and config.rdzv_backend != "static":
        yield "rdzv_id", "several machines need a name for the run, the same on all machines"
    if config.rdzv_backend == "static" and config.node_rank is None:
        yield "node_rank", "rdzv_backend static needs the number of this machine"
    if config.node_rank is not None and config.node_rank >= most:
        yield "node_rank", f"{config.node_rank}, but there are {most} machines, numbered from 0"
    if config.rdzv_backend == "static" and fewest != most:
        yield "nnodes", "rdzv_backend static cannot continue with fewer machines; use one number, or c10d"
