"""Looking: what a checkpoint is, told as data, and whether it is good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.checkpoint.manifest import MANIFEST, Manifest, is_folder_name, read_manifest
from penstock.checkpoint.reader import faults_of, found, read_state
from penstock.errors import CheckpointError

__all__ = ["choose", "describe", "verify"]


def choose(path: Path, *, step: int | None = None, is_all: bool = False) -> list[Path]:
    """Return the checkpoint that a path stands for, or all of a folder of them, the newest last.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is meant.
        step: of a folder of them, this one.
        is_all: all of them.

    Raises:
        CheckpointError: when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    every = found(path)
    is_damaged_one = is_folder_name(path.resolve().name) and not every
    if (path / MANIFEST).exists() or is_damaged_one:
        if step is not None or is_all:
            raise CheckpointError(f"{path}: is one checkpoint; give the folder that it is in")
        return [path]
    folders = [folder for folder, number, _, _ in every if step in (None, number)]
    if not folders:
        there = ", ".join(str(number) for _, number, _, _ in every) or "none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{path}: holds {wanted}; there are: {there}")
    return folders if is_all else folders[-1:]


def describe(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; its tensors are not read.

    Raises:
        CheckpointError: when its manifest or state is damaged, or a file is missing or not as long as it was.
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
        tensor: {"dtype": told["dtype"], "shape": told["shape"]} for tensor, told in entry.get("tensors", {}).items()
    }
    return {"name": name, "bytes": entry["bytes"], "tensors": tensors}


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"class": group.get("class"), "parameters": len(group["members"]), "options": group["options"]}
        for group in optimizer.get("groups", [])
    ]


def verify(folder: Path) -> list[str]:
    """Read every byte of a checkpoint; return everything that is wrong with it."""
    try:
        manifest = read_manifest(folder)
        faults = faults_of(manifest)
        if not faults:
            read_state(manifest)
    except CheckpointError as error:
        return [str(error)]
    return faults
