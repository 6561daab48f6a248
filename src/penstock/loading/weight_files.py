"""Weight files: find the files of a model's weights, and read single tensors from them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError, UsageError
from penstock.tensor_files.manifest import (
    FILE_NAME,
    MANIFEST,
    Manifest,
    read_json,
    read_manifest,
    step_folders,
)
from penstock.tensor_files.safetensors_reader import SafetensorsReader
from penstock.tensor_files.tensor_shards import Shard

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class WeightFiles:
    """The stored tensors of a model: the file of each one, with its shape and its dtype.

    Nothing but headers is read until `read` or `read_into` is called. `close` closes the files.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    readers: Mapping[str, SafetensorsReader | Shard]  # by tensor name
    settings: Mapping[str, Any] | None = None  # the content of config.json, if there is one
    aliases: Mapping[str, str] | None = None  # in a checkpoint of ours: further names of stored tensors

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a tensor, whatever its dtype and its device; a checkpoint's checksum is checked.

        Raises:
            CheckpointError: if the bytes cannot be read, or have changed.
        """
        reader = self.readers[name]
        if isinstance(reader, SafetensorsReader):
            reader.read_into(name, target)
        else:
            with torch.no_grad():
                target.copy_(reader.read(name))

    def close(self) -> None:
        """Close all files."""
        for reader in {id(reader): reader for reader in self.readers.values()}.values():
            reader.close()


def open_weights(path: str | PathLike[str]) -> WeightFiles:
    """Open the weights in a file or a folder.

    A folder is that of `save_pretrained` (one file, or several with an index), one with a single safetensors file, a
    checkpoint of Penstock, or a folder with checkpoints, of which the newest complete one is taken.

    Raises:
        CheckpointError: if there are no weights, or a file is missing, damaged or cut short.
        UsageError: if the path is of a wrong type.
    """
    if not isinstance(path, (str, PathLike)):
        raise UsageError(f"weights: give a file or a folder; given: {type(path).__name__}")
    place = Path(path).expanduser()
    if place.is_file():
        return _files_of(place, [place])
    if not place.is_dir():
        raise CheckpointError(f"{place}: no such file or folder")
    if (place / MANIFEST).exists():
        return _checkpoint(read_manifest(place))
    if any(step_folders(place)):
        return _checkpoint(_newest(place))
    if (place / INDEX).exists():
        return _indexed(place)
    found = sorted(file for file in place.glob("*.safetensors") if not file.name.startswith("adapter_"))
    if (place / SINGLE).exists():
        found = [place / SINGLE]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:3])
        raise CheckpointError(f"{place}: contains {len(found)} safetensors files ({names}, …), but no index: {INDEX}")
    if not found:
        raise CheckpointError(f"{place}: contains no weights: {_hint(place)}")
    return _files_of(place, found)


def _hint(folder: Path) -> str:
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        return f"{pickled[0]} is not a safetensors file; save the model again with save_pretrained"
    return f"no *.safetensors file, no {INDEX} and no {MANIFEST}"


def _files_of(place: Path, files: list[Path]) -> WeightFiles:
    for file in files:
        if file.suffix in _PICKLED:
            raise CheckpointError(
                f"{file}: only safetensors files are read; convert it: penstock checkpoint import, or safetensors.torch"
            )
    config = (place if place.is_dir() else place.parent) / "config.json"
    settings = read_json(config) if config.exists() else None
    shapes, readers = _opened(partial(SafetensorsReader, file) for file in files)
    return WeightFiles(place, shapes, readers, settings)


_Readers = dict[str, SafetensorsReader | Shard]


def _opened(
    openers: Iterable[Callable[[], SafetensorsReader | Shard]],
) -> tuple[dict[str, tuple[int, ...]], _Readers]:
    """Open files; return the shapes of all tensors and their readers. If one cannot be opened, none stays open."""
    readers: _Readers = {}
    shapes: dict[str, tuple[int, ...]] = {}
    with ExitStack() as on_failure:
        for opener in openers:
            reader = opener()
            on_failure.callback(reader.close)
            readers |= dict.fromkeys(reader.tensors, reader)
            shapes |= {name: stored.shape for name, stored in reader.tensors.items()}
            if not reader.tensors:  # nothing refers to it later
                reader.close()
        on_failure.pop_all()
    return shapes, readers


def _indexed(folder: Path) -> WeightFiles:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: has no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{folder / INDEX}: {name!r:.80} is not a valid file name")
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(f"{folder}: lacks {len(absent)} of {len(names)} files: {', '.join(absent[:3])}")
    found = _files_of(folder, [folder / name for name in names])
    missing = [name for name in weight_map if name not in found.readers]
    if missing:
        found.close()
        raise CheckpointError(f"{folder}: the files lack tensors that the index lists: {', '.join(missing[:5])}")
    return found


def _newest(folder: Path) -> Manifest:
    good, faults = [], []
    for _, path in step_folders(folder):
        try:
            manifest = read_manifest(path)
            manifest.check_sizes()
            good.append(manifest)
        except CheckpointError as error:
            faults.append(str(error))
    if not good:
        raise CheckpointError(f"{folder}: has no complete checkpoint: {faults[-1]}")
    return max(good, key=lambda manifest: manifest.order)


def _checkpoint(manifest: Manifest) -> WeightFiles:
    files = manifest.shards("model")
    shapes, readers = _opened(partial(Shard, manifest.folder / file, manifest.files[file]) for file in files)
    return WeightFiles(manifest.folder, shapes, readers, aliases=manifest.aliases)
