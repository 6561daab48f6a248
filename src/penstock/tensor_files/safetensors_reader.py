"""Safetensors reader: read single tensors of a file straight into memory; the file is never mapped or read whole."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.tensor_files.tensor_shards import DTYPES, MAX_HEADER_BYTES, bytes_of, read_fully

_PIECE_BYTES = 16 << 20  # read at once where a tensor is converted or copied to another device


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is in its file, and its form."""

    dtype: str  # in the words of safetensors
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class SafetensorsReader:
    """An open safetensors file. Only its header and the requested tensors are read.

    Raises:
        CheckpointError: if the file cannot be read, is cut short or is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            found = os.fstat(self._handle)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
            self.tensors: Mapping[str, TensorPlace] = self._read_header(found.st_size)
        except BaseException:
            self.close()
            raise

    def _read_header(self, num_bytes: int) -> dict[str, TensorPlace]:
        size = int.from_bytes(self._bytes(0, 8, "its header"), "little") if num_bytes >= 8 else 0
        if not 2 <= size <= MAX_HEADER_BYTES or self._bytes(8, 1, "its header", may_end=True) != b"{":
            raise CheckpointError(f"{self.path}: is not a safetensors file")
        if 8 + size > num_bytes:
            raise CheckpointError(f"{self.path}: is cut short: it has {num_bytes} bytes, its header alone {8 + size}")
        try:
            plain = json.loads(self._bytes(8, size, "its header"))
            plain.pop("__metadata__", None)
            places = {str(name): _place(info, 8 + size) for name, info in plain.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header is damaged: {error!s:.100}") from error
        end = 8 + size
        for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
            if place.begin != end:
                raise CheckpointError(f"{self.path}: its header is damaged: a gap or an overlap before {name:.100}")
            end += place.num_bytes
        if end > num_bytes:
            raise CheckpointError(f"{self.path}: is cut short: it has {num_bytes} bytes, its header describes {end}")
        return places

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its own dtype, on the CPU."""
        place = self.tensors[name]
        tensor = torch.empty(place.shape, dtype=self._dtype(name))
        self.read_into(name, tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a tensor of the same shape, on any device and of any dtype; values are converted piece by piece."""
        place, dtype = self.tensors[name], self._dtype(name)
        if not place.num_bytes:
            return
        if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            self._fill(bytes_of(target.detach()), place.begin, f"tensor {name}")
            return
        per_piece = max(1, _PIECE_BYTES // dtype.itemsize)
        pieces = target.detach().view(-1) if target.is_contiguous() else target.new_empty(target.shape).view(-1)
        staging = torch.empty(min(per_piece, pieces.numel()), dtype=dtype)
        for start in range(0, pieces.numel(), per_piece):
            part = pieces[start : start + per_piece]
            piece = staging[: part.numel()]
            self._fill(bytes_of(piece), place.begin + start * dtype.itemsize, f"tensor {name}")
            part.copy_(piece)
        if not target.is_contiguous():
            target.copy_(pieces.view(target.shape))

    def _dtype(self, name: str) -> torch.dtype:
        place = self.tensors[name]
        if place.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name} has dtype {place.dtype}, which torch cannot hold")
        return DTYPES[place.dtype]

    def _bytes(self, at: int, count: int, what: str, *, may_end: bool = False) -> bytes:
        data = bytearray(count)
        try:
            self._fill(memoryview(data), at, what)
        except CheckpointError:
            if not may_end:
                raise
            return b""
        return bytes(data)

    def _fill(self, view: memoryview, at: int, what: str) -> None:
        read_fully(self._handle, view, at, self.path, what)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place(info: Any, data: int) -> TensorPlace:  # noqa: ANN401 - as JSON gives it
    """Return the place of a tensor from its entry in the header; the file's data begins at the offset `data`."""
    begin, end = info["data_offsets"]
    shape = tuple(info["shape"])
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)) or end < begin:
        raise ValueError("a size or an offset is not a whole number")
    dtype = str(info["dtype"])
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{end - begin} bytes for a tensor of shape {shape} and dtype {dtype}")
    return TensorPlace(dtype, shape, data + begin, end - begin)
