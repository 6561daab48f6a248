"""Reader: find the checkpoints of a folder, and read what the lanes of this process need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.content import PARTS, Content
from penstock.checkpoint.manifest import Manifest, read_json, read_manifest, step_folders
from penstock.checkpoint.misfit import MisfitError
from penstock.checkpoint.state_as_json import from_plain
from penstock.checkpoint.tensor_shards import Shard
from penstock.errors import CheckpointError

_NOTHING: dict[str, Any] = {"optimizer": None, "schedulers": [], "scaler": None, "data": None, "random": []}


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored.

    Attributes:
        step: the step at which the training continues.
        folder: the folder of the checkpoint.
        notes: the notes that were passed to `save`.
        passed_over: why newer checkpoints were skipped.
    """

    step: int
    folder: Path
    notes: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """The checked content of a checkpoint, before it changes anything."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    loss: Mapping[str, torch.Tensor]
    prepared: list[Any]
    state: Mapping[str, Any]


def found(folder: Path) -> list[tuple[Path, int, Manifest | None, str]]:
    """Return all checkpoints of a folder, the newest last: folder, step, manifest, and the manifest's fault.

    A checkpoint with an unreadable manifest is sorted by its step.
    """
    every: list[tuple[Path, int, Manifest | None, str]] = []
    for step, path in step_folders(folder):
        try:
            every.append((path, step, read_manifest(path), ""))
        except CheckpointError as error:
            every.append((path, step, None, str(error)))
    good = sorted((entry for entry in every if entry[2] is not None), key=lambda entry: entry[2].order)  # type: ignore[union-attr]
    for entry in (entry for entry in every if entry[2] is None):
        at = next((number for number, other in enumerate(good) if other[1] > entry[1]), len(good))
        good.insert(at, entry)
    return good


def complete(folder: Path) -> list[Manifest]:
    """Return the checkpoints with a good manifest and files of the right sizes, the newest last."""
    result = []
    for _, _, manifest, _ in found(folder):
        if manifest is not None:
            try:
                manifest.check_sizes()
            except CheckpointError:
                continue
            result.append(manifest)
    return result


def read_state(manifest: Manifest) -> dict[str, Any]:
    """Read the state file of a checkpoint.

    Raises:
        CheckpointError: if it is damaged.
    """
    entry = manifest.files["state.json"]
    state = read_json(manifest.folder / "state.json", num_bytes=entry["bytes"], xxh3=entry["xxh3"])
    missing = {"step", "notes", "schedulers", "scaler", "data", "optimizer", "random"} - state.keys()
    if missing or state["step"] != manifest.step:
        raise CheckpointError(f"{manifest.folder / 'state.json'}: is not the state of step {manifest.step}")
    return state


def faults_of(
    manifest: Manifest, names: Iterable[str] | None = None, *, read: Mapping[str, set[str]] | None = None
) -> list[str]:
    """Read every byte of a checkpoint's files; return all faults.

    Args:
        manifest: the manifest of the checkpoint.
        names: check only these files.
        read: for each file, the tensors that are already checked.
    """
    faults = []
    for name in manifest.files if names is None else names:
        entry = manifest.files[name]
        done = (read or {}).get(name, set())
        try:
            if "tensors" not in entry:
                read_json(manifest.folder / name, num_bytes=entry["bytes"], xxh3=entry["xxh3"])
                continue
            with Shard(manifest.folder / name, entry) as shard:
                for tensor in sorted(shard.tensors.keys() - done):
                    try:
                        shard.read(tensor)
                    except CheckpointError as error:
                        faults.append(str(error))
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def load(
    manifest: Manifest, content: Content, *, process: int, num_processes: int, parts: Collection[str] = PARTS
) -> Loaded:
    """Read and check what the lanes of this process need; all processes together check the whole checkpoint.

    Raises:
        CheckpointError: if something is damaged; the message has all faults.
        MisfitError: if the checkpoint is of another model.
    """
    state = _only(read_state(manifest), parts)
    model_file, optim_file = manifest.file_of("model"), manifest.file_of("optim")
    read: dict[str, set[str]] = {}
    with ExitStack() as stack:
        shards = {
            file: stack.enter_context(Shard(manifest.folder / file, manifest.files[file]))
            for file in (*manifest.shards("model"), *manifest.shards("optim"))
        }
        misfit = content.misfit(manifest.shapes("model"))  # checked after the shards, which verify the manifest
        if misfit:
            raise MisfitError(f"{manifest.folder} is a checkpoint of another model; {misfit}")

        def fetch(file_of: Mapping[str, str], name: str) -> torch.Tensor:
            if name not in file_of:
                raise CheckpointError(f"{manifest.folder}: none of its files has tensor {name!r}")
            read.setdefault(file_of[name], set()).add(name)
            return shards[file_of[name]].read(name)

        tensors, loss = {}, {}
        if "model" in parts:
            tensors = {name: fetch(model_file, found) for name, found in content.needed(model_file).items()}
            loss = {name: fetch(optim_file, name) for name in content.loss_names() if name in optim_file}
        try:
            prepared = content.optimizers.prepare(state["optimizer"], lambda name: fetch(optim_file, name))
            for plain in (state["notes"], state["data"], state["scaler"], *content.scheduler_states(state)):
                from_plain(plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{manifest.folder / 'state.json'}: contradicts itself: {error!r:.200}") from error
    faults = faults_of(manifest, _share(manifest, process, num_processes), read=read)
    if faults:
        raise CheckpointError("; ".join(faults))
    return Loaded(manifest, tensors, loss, prepared, state)


def _only(state: Mapping[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Return the state as if only these parts had been saved."""
    kept = {"schedulers" if part == "scheduler" else part for part in parts}
    return {**state, **{key: nothing for key, nothing in _NOTHING.items() if key not in kept}}


def _share(manifest: Manifest, process: int, num_processes: int) -> list[str]:
    """Return the files that a process checks. With the saved number of lanes, these are the files it reads anyway."""
    shards = [manifest.shards(kind) for kind in ("model", "optim")]
    rest = [name for name in manifest.files if all(name not in files for files in shards)]
    mine = [name for files in shards for number, name in enumerate(files) if number % num_processes == process]
    return mine + (sorted(rest) if process == 0 else [])
