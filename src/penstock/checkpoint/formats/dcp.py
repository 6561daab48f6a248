"""DCP: checkpoints of torch.distributed.checkpoint, read without unpickling them, and written by torch itself."""

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

from penstock.checkpoint.disk import open_plain
from penstock.checkpoint.formats.pickle_reader import Made, Name, read_pickled
from penstock.checkpoint.tensor_shards import SAFE_NAMES
from penstock.errors import CheckpointError

__all__ = ["METADATA", "load_tensors", "read_dcp", "write_dcp"]

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 28
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
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
    """Write tensors as torch.distributed.checkpoint does."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other processes is no news
        save(dict(tensors), checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of torch.distributed.checkpoint; what is no tensor is left out.

    Raises:
        CheckpointError: when it is damaged, or holds what could run.
    """
    path = folder / METADATA
    data = _read(path, 0, None)
    root = read_pickled(data, _ALLOWED, source=str(path))
    try:
        described, places = root.fields["state_dict_metadata"], root.fields["storage_data"]
        stored: dict[str, list[tuple[Made, Made]]] = {}
        for index, info in places.items():
            stored.setdefault(index.fields["fqn"], []).append((index, info))
        return {
            name: _tensor(folder, name, told, stored.get(name, []))
            for name, told in described.items()
            if told.name.name == "TensorStorageMetadata"
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{path}: does not describe tensors as torch writes them: {error!s:.200}") from error


def _tensor(folder: Path, name: str, told: Made, stored: list[tuple[Made, Made]]) -> torch.Tensor:
    """Put a tensor together from its chunks."""
    properties = told.fields["properties"].state
    dtype = _DTYPES[(properties["dtype"] if isinstance(properties, dict) else properties[0]).name]
    shape = _size(told.fields["size"])
    chunks = [(_size(c.fields["offsets"]), _size(c.fields["sizes"])) for c in told.fields["chunks"]]
    num_elements = math.prod(shape)
    if sum(math.prod(sizes) for _, sizes in chunks) != num_elements or len(chunks) != len(stored):
        raise CheckpointError(f"{folder}: the chunks of tensor {name} are not the whole of it")
    needed = num_elements * dtype.itemsize
    if needed > sum(int(info.fields["length"]) for _, info in stored):
        raise CheckpointError(f"{folder}: tensor {name} would have {needed} bytes, more than is stored of it")
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


def _load_part(folder: Path, name: str, info: Made) -> torch.Tensor:
    file = info.fields["relative_path"]
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        raise CheckpointError(f"{folder}: {file!r:.80} cannot be the name of its file")
    if info.fields.get("transform_descriptors"):
        raise CheckpointError(f"{folder / file}: tensor {name} is compressed, which is not read here")
    data = _read(folder / file, int(info.fields["offset"]), int(info.fields["length"]))
    part = load_tensors(io.BytesIO(data), f"{folder / file}: tensor {name}")
    if not isinstance(part, torch.Tensor):
        raise CheckpointError(f"{folder / file}: tensor {name} is a {type(part).__name__}")
    return part.detach()


def load_tensors(file: io.BytesIO | Path, what: str) -> Any:  # noqa: ANN401 - tensors, and containers of them
    """Read a file of torch.save that holds tensors and nothing that could run.

    Raises:
        CheckpointError: when it holds more, or is damaged; it is never read in another way then.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common class for what a crafted file leads to
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        found = re.search(r"(?:Unsupported global: GLOBAL|global) (\S+)", str(error))
        named = f"it names {found[1]}" if found else reason[0][:200]
        raise CheckpointError(
            f"{what}: refused, nothing in it was run: it is damaged or holds more than tensors: {named}"
        ) from error


def _size(made: Any) -> tuple[int, ...]:  # noqa: ANN401 - what the file has there
    values = made.args[0] if isinstance(made, Made) and made.name == Name("torch", "Size") else made
    if not isinstance(values, tuple) or not all(isinstance(v, int) and 0 <= v < 1 << 62 for v in values):
        raise ValueError("a size is not made of whole numbers")
    return values


def _read(path: Path, begin: int, length: int | None) -> bytes:
    """Read a part of a file, or a small file whole."""
    try:
        handle, size = open_plain(path)
        with os.fdopen(handle, "rb") as file:
            wanted = size if length is None else length
            if length is None and size > _MAX_METADATA_BYTES:
                raise CheckpointError(f"{path}: {size} bytes are more than such a file ever has")
            if begin < 0 or wanted < 0 or begin + wanted > size:
                raise CheckpointError(f"{path}: has {size} bytes, and {begin + wanted} are needed")
            file.seek(begin)
            return file.read(wanted)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
