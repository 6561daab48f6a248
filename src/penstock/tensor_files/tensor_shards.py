"""Tensor shards: safetensors files with a checksum of each tensor; reading checks every byte."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash

from penstock.errors import CheckpointError, UsageError
from penstock.tensor_files.disk import Disk, chunks, open_plain

# the dtypes of safetensors; it cannot hold others
SAFE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in SAFE_NAMES.items()}
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3 hash of some bytes; it detects accidents, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]  # torch's stubs


def read_fully(handle: int, view: memoryview, at: int, path: Path, what: str) -> None:
    """Fill a buffer with the bytes of a file from an offset on; raise a CheckpointError if the file ends before."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(handle, [view[done : done + (1 << 30)]], at + done)
        except OSError as error:
            raise CheckpointError(f"{path}: {what} cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{path}: ends within {what}")
        done += count


@dataclass(frozen=True)
class Stored:
    """A tensor of a shard, as the manifest describes it."""

    dtype: str
    shape: tuple[int, ...]
    xxh3: str

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


def check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a UsageError with the first tensor that safetensors cannot hold."""
    kinds = set(map(attrgetter("dtype", "layout"), tensors.values()))
    if all(dtype in SAFE_NAMES and layout is torch.strided for dtype, layout in kinds):
        return
    for name, tensor in tensors.items():
        # quantized tensors have dtypes of their own
        if tensor.dtype not in SAFE_NAMES or tensor.layout is not torch.strided:
            raise UsageError(
                f"{name}: a checkpoint cannot hold a tensor of {tensor.dtype}, {tensor.layout}; convert it, or keep it "
                "out of the model's state (persistent=False)"
            )


def write_shard(disk: Disk, path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write CPU tensors as a safetensors file; return its entry in the manifest."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    form_of = {name: {"dtype": SAFE_NAMES[t.dtype], "shape": list(t.shape)} for name, t in tensors.items()}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        entries[name] = {**form_of[name], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    written: dict[str, dict[str, Any]] = {}

    def parts() -> Iterator[bytes | memoryview]:
        yield head
        for name, tensor in tensors.items():
            digest = xxhash.xxh3_128()
            for chunk in chunks(bytes_of(tensor)):
                digest.update(chunk)
                yield chunk
            written[name] = {**form_of[name], "xxh3": digest.hexdigest()}

    num_bytes = disk.write_file(path, parts())
    return {"bytes": num_bytes, "header_bytes": len(head), "header_xxh3": checksum(head), "tensors": written}


class Shard:
    """An open safetensors file, which must match its entry in the manifest; each tensor is checked when it is read."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self.path = path
        self.tensors = {
            name: Stored(info["dtype"], tuple(info["shape"]), info["xxh3"]) for name, info in entry["tensors"].items()
        }
        try:
            self._handle, num_bytes = open_plain(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            if num_bytes != entry["bytes"]:
                raise CheckpointError(f"{path}: has {num_bytes} bytes, expected {entry['bytes']}")
            self._places = self._read_header(entry, num_bytes)
        except BaseException:
            self.close()
            raise

    def _read_header(self, entry: Mapping[str, Any], num_bytes: int) -> dict[str, int]:
        """Check the header; return the offset of each tensor."""
        size = entry["header_bytes"]
        if not 8 <= size <= min(num_bytes, MAX_HEADER_BYTES):
            raise CheckpointError(f"{self.path}: its header cannot have {size} bytes")
        head = self._read(0, memoryview(bytearray(size)), "its header")
        actual = checksum(head)
        if actual != entry["header_xxh3"]:
            raise CheckpointError(f"{self.path}: its header has checksum {actual}, expected {entry['header_xxh3']}")
        places, at = {}, size
        try:
            plain = json.loads(bytes(head[8:]))
            plain.pop("__metadata__", None)
            for name in sorted(plain, key=lambda name: plain[name]["data_offsets"]):
                info, stored = plain[name], self.tensors[name]
                begin, end = info["data_offsets"]
                is_same = (info["dtype"], tuple(info["shape"])) == (stored.dtype, stored.shape)
                if not is_same or end - begin != stored.num_bytes or begin + size != at:
                    raise ValueError(name)
                places[name] = at
                at += stored.num_bytes
            if at != num_bytes or len(places) != len(self.tensors):
                raise ValueError("its tensors do not fill the file")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header contradicts the manifest: {error!s:.100}") from error
        return places

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor; raise a CheckpointError if its bytes have changed."""
        stored = self.tensors[name]
        memory = torch.empty(stored.num_bytes, dtype=torch.uint8)
        self._read(self._places[name], bytes_of(memory), f"tensor {name}")
        actual = checksum(bytes_of(memory))
        if actual != stored.xxh3:
            raise CheckpointError(f"{self.path}: tensor {name} has checksum {actual}, expected {stored.xxh3}")
        return memory.view(DTYPES[stored.dtype]).reshape(stored.shape)

    def _read(self, at: int, view: memoryview, what: str) -> memoryview:
        read_fully(self._handle, view, at, self.path, what)
        return view

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
