"""Reader: find the checkpoints of a folder, describe and verify them, and read what this process needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.content import Content
from penstock.checkpoint.state_as_json import from_plain
from penstock.errors import CheckpointError
from penstock.tensor_files.manifest import (
    MANIFEST,
    Manifest,
    MisfitError,
    is_folder_name,
    read_json,
    read_manifest,
    step_folders,
)
from penstock.tensor_files.tensor_shards import Shard

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


def found(folder: Path) -> list[tuple[int, Path, Manifest | None]]:
    """Return all checkpoints of a folder, the newest last: step, folder, and the manifest if it is good.

    A checkpoint with an unreadable manifest is sorted by its step.
    """
    every: list[tuple[int, Path, Manifest | None]] = []
    bad = []
    for step, path in step_folders(folder):
        try:
            every.append((step, path, read_manifest(path)))
        except CheckpointError:
            bad.append((step, path))
    every.sort(key=lambda entry: entry[2].order)  # type: ignore[union-attr]  # none is None so far
    for step, path in bad:
        at = next((number for number, (other, _, _) in enumerate(every) if other > step), len(every))
        every.insert(at, (step, path, None))
    return every


def readable(folder: Path) -> list[Manifest]:
    """Return the checkpoints with a good manifest, the newest last."""
    return [manifest for _, _, manifest in found(folder) if manifest is not None]


def complete(folder: Path) -> list[Manifest]:
    """Return the checkpoints with a good manifest and files of the right sizes, the newest last."""
    result = []
    for manifest in readable(folder):
        try:
            manifest.check_sizes()
        except CheckpointError:
            continue
        result.append(manifest)
    return result


def read_state(manifest: Manifest) -> dict[str, Any]:
    """Read and check the state file of a checkpoint."""
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


def load(manifest: Manifest, content: Content, *, process: int, num_processes: int, parts: Collection[str]) -> Loaded:
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


# ---- inspection


def choose(path: Path, *, step: int | None = None, is_all: bool = False) -> list[Path]:
    """Return the checkpoint at a path; if the path is a folder of checkpoints, the newest one or all, newest last.

    Args:
        path: a checkpoint, or a folder of checkpoints.
        step: in a folder of checkpoints, choose this step.
        is_all: in a folder of checkpoints, choose all.

    Raises:
        CheckpointError: if there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    every = found(path)
    is_damaged_one = is_folder_name(path.resolve().name) and not every
    if (path / MANIFEST).exists() or is_damaged_one:
        if step is not None or is_all:
            raise CheckpointError(f"{path}: is a single checkpoint; give its parent folder")
        return [path]
    folders = [folder for number, folder, _ in every if step in (None, number)]
    if not folders:
        there = ", ".join(str(number) for number, _, _ in every) or "none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{path}: contains {wanted}; existing steps: {there}")
    return folders if is_all else folders[-1:]


def describe(folder: Path) -> dict[str, Any]:
    """Describe a checkpoint from its manifest and state; its tensors are not read.

    Raises:
        CheckpointError: if its manifest or state is damaged, or a file is missing or has the wrong size.
    """
    manifest = read_manifest(folder)
    manifest.check_sizes()
    state = read_state(manifest)
    plan = dict(manifest.plan)
    schedule = plan.pop("schedule", None)
    return {
        "folder": str(folder),
        "step": manifest.step,
        "bytes": manifest.num_bytes,
        "plan": plan | ({"schedule": schedule.get("name")} if isinstance(schedule, dict) else {}),
        "files": [_file(manifest, name) for name in sorted(manifest.files)],
        "aliases": dict(manifest.aliases),
        "optimizer": None if state["optimizer"] is None else _groups(state["optimizer"]),
        "schedulers": len(state["schedulers"]),
        "scaler": state["scaler"] is not None,
        "data": state["data"],
        "processes": len(state["random"]),
        "notes": state["notes"],
        "versions": dict(manifest.versions),
    }


def _file(manifest: Manifest, name: str) -> dict[str, Any]:
    entry = manifest.files[name]
    tensors = {
        tensor: {"dtype": info["dtype"], "shape": info["shape"]} for tensor, info in entry.get("tensors", {}).items()
    }
    return {"name": name, "bytes": entry["bytes"], "tensors": tensors}


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"class": group.get("class"), "parameters": len(group["members"]), "options": group["options"]}
        for group in optimizer.get("groups", [])
    ]


def verify(folder: Path) -> list[str]:
    """Read every byte of a checkpoint; return all faults."""
    try:
        manifest = read_manifest(folder)
        faults = faults_of(manifest)
        if not faults:
            read_state(manifest)
    except CheckpointError as error:
        return [str(error)]
    return faults
