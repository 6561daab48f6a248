"""DCP: read checkpoints of torch.distributed.checkpoint without unpickling them, and write them with torch."""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.formats.pickle_reader import Name, RecordedCall, read_pickled
from penstock.errors import CheckpointError
from penstock.tensor_files.disk import open_plain
from penstock.tensor_files.manifest import FILE_NAME
from penstock.tensor_files.tensor_shards import SAFE_NAMES

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 28
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFE_NAMES}
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    _METADATA_MODULE: {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "pathlib": {"PosixPath", "WindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "Path"},
}  # fmt: skip


def write_dcp(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors with torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are no other processes
        save(dict(tensors), checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a torch.distributed.checkpoint; skip everything else.

    Raises:
        CheckpointError: if it is damaged, or contains code that could run.
    """
    path = folder / METADATA
    data = _read(path, 0, None)
    root = read_pickled(data, _ALLOWED, source=str(path))
    try:
        described, places = root.fields["state_dict_metadata"], root.fields["storage_data"]
        stored: dict[str, list[tuple[RecordedCall, RecordedCall]]] = {}
        for index, info in places.items():
            stored.setdefault(index.fields["fqn"], []).append((index, info))
        return {
            name: _tensor(folder, name, description, stored.get(name, []))
            for name, description in described.items()
            if description.name.name == "TensorStorageMetadata"
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{path}: is not a valid description of tensors: {error!s:.200}") from error


def _tensor(
    folder: Path, name: str, description: RecordedCall, stored: list[tuple[RecordedCall, RecordedCall]]
) -> torch.Tensor:
    """Assemble a tensor from its chunks."""
    properties = description.fields["properties"].state
    dtype = _DTYPES[(properties["dtype"] if isinstance(properties, dict) else properties[0]).name]
    shape = _size(description.fields["size"])
    chunks = [(_size(c.fields["offsets"]), _size(c.fields["sizes"])) for c in description.fields["chunks"]]
    num_elements = math.prod(shape)
    if sum(math.prod(sizes) for _, sizes in chunks) != num_elements or len(chunks) != len(stored):
        raise CheckpointError(f"{folder}: the chunks of tensor {name} do not cover it")
    needed = num_elements * dtype.itemsize
    if needed > sum(int(info.fields["length"]) for _, info in stored):
        raise CheckpointError(f"{folder}: tensor {name} needs {needed} bytes, more than are stored")
    whole = None
    for index, info in stored:
        at = tuple(0 for _ in shape) if index.fields["offset"] is None else _size(index.fields["offset"])
        sizes = next(sizes for offsets, sizes in chunks if offsets == at)
        part = _load_part(folder, name, info)
        if part.dtype != dtype or tuple(part.shape) != sizes:
            raise CheckpointError(
                f"{folder}: a chunk of tensor {name} is {part.dtype} {tuple(part.shape)}, not {sizes}"
            )
        if sizes == shape:
            return part
        whole = torch.empty(shape, dtype=dtype) if whole is None else whole
        whole[tuple(slice(begin, begin + size) for begin, size in zip(at, sizes, strict=True))] = part
    assert whole is not None
    return whole


def _load_part(folder: Path, name: str, info: RecordedCall) -> torch.Tensor:
    file = info.fields["relative_path"]
    if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
        raise CheckpointError(f"{folder}: {file!r:.80} is not a valid file name")
    if info.fields.get("transform_descriptors"):
        raise CheckpointError(f"{folder / file}: tensor {name} is compressed, which is not supported")
    data = _read(folder / file, int(info.fields["offset"]), int(info.fields["length"]))
    part = load_tensors(io.BytesIO(data), f"{folder / file}: tensor {name}")
    if not isinstance(part, torch.Tensor):
        raise CheckpointError(f"{folder / file}: tensor {name} is a {type(part).__name__}")
    return part.detach()


def load_tensors(file: io.BytesIO | Path, what: str) -> Any:  # noqa: ANN401 - tensors, and containers of them
    """Read a torch.save file that contains only tensors.

    Raises:
        CheckpointError: if it contains anything else or is damaged; there is no other way to read it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common error class for crafted files
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        found = re.search(r"(?:Unsupported global: GLOBAL|global) (\S+)", str(error))
        named = f"it names {found[1]}" if found else reason[0][:200]
        raise CheckpointError(
            f"{what}: refused without running it: it is damaged or contains more than tensors: {named}"
        ) from error


def _size(made: Any) -> tuple[int, ...]:  # noqa: ANN401 - any content of the file
    values = made.args[0] if isinstance(made, RecordedCall) and made.name == Name("torch", "Size") else made
    if not isinstance(values, tuple) or not all(isinstance(v, int) and 0 <= v < 1 << 62 for v in values):
        raise ValueError("a size is not a tuple of whole numbers")
    return values


def _read(path: Path, begin: int, length: int | None) -> bytes:
    """Read a part of a file, or a whole small file."""
    try:
        handle, size = open_plain(path)
        with os.fdopen(handle, "rb") as file:
            wanted = size if length is None else length
            if length is None and size > _MAX_METADATA_BYTES:
                raise CheckpointError(f"{path}: has {size} bytes, which is too large for this kind of file")
            if begin < 0 or wanted < 0 or begin + wanted > size:
                raise CheckpointError(f"{path}: has {size} bytes, and {begin + wanted} are needed")
            file.seek(begin)
            return file.read(wanted)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
