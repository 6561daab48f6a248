"""Manifest: the file that lists the contents of a checkpoint, with checksums; it is written last."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.tensor_files.disk import open_plain
from penstock.tensor_files.tensor_shards import SAFE_NAMES, checksum

MANIFEST = "MANIFEST.json"
FORM = "penstock checkpoint"
VERSION = 1
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_FOLDER_NAME = re.compile(r"checkpoint-([0-9]{6,18})")
_HASH = re.compile(r"[0-9a-f]{32}")
_MAX_JSON_BYTES = 1 << 28
_MAX_DIMENSIONS = 64


class MisfitError(CheckpointError):
    """A good checkpoint of another model, parameter groups or schedulers; older checkpoints are then not tried."""


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"checkpoint-{step:06d}"


def is_folder_name(name: str) -> bool:
    """Return whether a name is that of a checkpoint."""
    return _FOLDER_NAME.fullmatch(name) is not None


def step_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the step and path of each folder that has a checkpoint's name, good or not."""
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    for path in paths:
        found = _FOLDER_NAME.fullmatch(path.name)
        if found and path.is_dir() and not path.is_symlink():
            yield int(found[1]), path


def to_bytes(plain: Mapping[str, Any]) -> bytes:
    """Return canonical JSON: the same data gives the same bytes."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_json(path: Path, *, num_bytes: int | None = None, xxh3: str | None = None) -> dict[str, Any]:
    """Read a JSON object of a checkpoint, and check its size and checksum if they are given."""
    try:
        handle, size = open_plain(path)
        with os.fdopen(handle, "rb") as file:
            if num_bytes is not None and size != num_bytes:
                raise CheckpointError(f"{path}: has {size} bytes, expected {num_bytes}")
            if size > _MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: has {size} bytes, which is too large for this kind of file")
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if xxh3 is not None and checksum(data) != xxh3:
        raise CheckpointError(f"{path}: has checksum {checksum(data)}, expected {xxh3}")
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error!s:.100}") from error
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return plain


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    folder: Path
    step: int
    order: int  # the newest checkpoint of a folder has the largest number
    plan: Mapping[str, Any]  # the cuts, schedule, lanes and micro-batches of the saved pipeline
    versions: Mapping[str, str]  # of Penstock and its packages
    aliases: Mapping[str, str]  # additional names of tensors that are stored once
    files: Mapping[str, Mapping[str, Any]]  # the size and checksums of each file

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        plain = {
            "form": FORM, "version": VERSION, "step": self.step, "order": self.order, "plan": self.plan,
            "versions": self.versions, "aliases": self.aliases, "files": self.files,
        }  # fmt: skip
        return to_bytes({**plain, "xxh3": checksum(to_bytes(plain))})

    def shards(self, kind: str) -> list[str]:
        """Return the files that hold tensors of a kind: "model" or "optim"."""
        return sorted(name for name, entry in self.files.items() if "tensors" in entry and name.startswith(f"{kind}-"))

    def file_of(self, kind: str) -> dict[str, str]:
        """Return the file of each tensor of a kind."""
        return {name: file for file in self.shards(kind) for name in self.files[file]["tensors"]}

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a kind."""
        return {
            name: tuple(info["shape"])
            for file in self.shards(kind)
            for name, info in self.files[file]["tensors"].items()
        }

    @property
    def num_bytes(self) -> int:
        """The size of all files together."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    def check_sizes(self) -> None:
        """Check that all files exist with the right size; read nothing."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                size = path.lstat().st_size
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path}: is not a regular file")
            if size != entry["bytes"]:
                raise CheckpointError(f"{path}: has {size} bytes, expected {entry['bytes']}")


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint."""
    path = folder / MANIFEST
    plain = read_json(path)
    if plain.get("form") != FORM:
        raise CheckpointError(f"{path}: is not the manifest of a Penstock checkpoint")
    if plain.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: has version {plain.get('version')!r:.20}; this Penstock reads version {VERSION}"
        )
    expected = plain.pop("xxh3", None)
    actual = checksum(to_bytes(plain))
    if actual != expected:
        raise CheckpointError(f"{path}: has checksum {actual}, expected {expected!r:.40}")
    fault = _fault_of(plain)
    if fault:
        raise CheckpointError(f"{path}: {fault}")
    named = _FOLDER_NAME.fullmatch(folder.name)
    if named and int(named[1]) != plain["step"]:
        raise CheckpointError(f"{path}: belongs to step {plain['step']}")
    return Manifest(folder, *(plain[key] for key in ("step", "order", "plan", "versions", "aliases", "files")))


def _fault_of(plain: Mapping[str, Any]) -> str:  # noqa: PLR0911 - a list of faults
    """Return the fault of a manifest, or "". Its checksum is right, but anyone can make a checksum."""
    if not _is_count(plain.get("step")) or not _is_count(plain.get("order")):
        return "its step or order is not a whole number"
    for key in ("plan", "versions", "aliases", "files"):
        if not isinstance(plain.get(key), dict):
            return f"it has no {key}"
    for name, entry in plain["files"].items():
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            return f"{name!r:.80} is not a valid file name: it must match {FILE_NAME.pattern}"
        if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
            return f"the size of {name} is not a whole number"
        if "tensors" not in entry:
            if not _is_hash(entry.get("xxh3")):
                return f"{name} has no checksum"
            continue
        if not isinstance(entry["tensors"], dict) or not _is_count(entry.get("header_bytes")):
            return f"{name} has no valid list of tensors"
        if not _is_hash(entry.get("header_xxh3")):
            return f"the header of {name} has no checksum"
        bad = next((tensor for tensor, info in entry["tensors"].items() if not _is_tensor(info)), None)
        if bad is not None:
            return f"{name}: tensor {bad!r:.80} has an invalid dtype, shape or checksum"
    if "state.json" not in plain["files"]:
        return "it does not list state.json"
    return ""


def _is_count(thing: object) -> bool:
    return isinstance(thing, int) and not isinstance(thing, bool) and 0 <= thing < 1 << 62


def _is_hash(thing: object) -> bool:
    return isinstance(thing, str) and _HASH.fullmatch(thing) is not None


def _is_tensor(info: object) -> bool:
    if not isinstance(info, dict) or info.get("dtype") not in SAFE_NAMES.values() or not _is_hash(info.get("xxh3")):
        return False
    shape: Sequence[object] = info.get("shape", None)  # type: ignore[assignment]
    return isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and all(map(_is_count, shape))
