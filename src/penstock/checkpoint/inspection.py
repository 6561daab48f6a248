"""Inspection: describe a checkpoint as data, and verify it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.checkpoint.manifest import MANIFEST, Manifest, is_folder_name, read_manifest
from penstock.checkpoint.reader import faults_of, found, read_state
from penstock.errors import CheckpointError


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
    folders = [folder for folder, number, _, _ in every if step in (None, number)]
    if not folders:
        there = ", ".join(str(number) for _, number, _, _ in every) or "none"
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
