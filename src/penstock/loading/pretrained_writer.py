"""Pretrained writer: save a model in the layout of `save_pretrained`; every process writes the tensors of its lanes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from penstock.errors import OutputError, UsageError, error_in_short
from penstock.loading.weight_files import INDEX, SINGLE
from penstock.loading.weight_loader import in_all_processes
from penstock.loading.weight_recipes import is_of_transformers
from penstock.tensor_files.disk import Disk
from penstock.tensor_files.tensor_shards import check_storable, write_shard

Gather = Callable[[Any], list[Any]]  # returns the JSON values of all processes, the first one's first
_OURS = re.compile(r"model.*\.safetensors(?:\.index\.json)?|(?:generation_)?config\.json")


class PretrainedWriter:
    """Writes the tensors of a model, in all processes at once; a folder appears when it is complete.

    Args:
        model: the user's model; one of transformers also gets its config, and the names that its files have.
        gather: exchanges values between the processes; they all must make the same calls.
        is_first: whether this process checks and makes the folder.
    """

    def __init__(self, model: nn.Module, gather: Gather, *, is_first: bool) -> None:
        self._model, self._gather, self._is_first, self._disk = model, gather, is_first, Disk()

    def write(
        self, own: Mapping[str, torch.Tensor], folder: str | Path, *, max_shard_bytes: float, overwrite: bool
    ) -> Path:
        """Write the tensors of this process, which no other process writes; return the folder.

        Raises:
            OutputError: if the folder cannot be written, or contains something else.
            UsageError: if a tensor cannot be stored, or only several lanes together hold what makes one of a file.
        """
        path = Path(folder).expanduser()
        hidden = path.with_name(f".{path.name}.{self._gather(secrets.token_hex(4))[0]}")
        self._together(lambda: self._begin(path, hidden, overwrite=overwrite))
        try:
            shards = self._together(lambda: list(_shards(self._stored(own), max_shard_bytes)))
            counts = self._gather(len(shards))
            first, total = sum(counts[: self._place(counts)]), sum(counts)
            written = self._together(lambda: self._write_shards(hidden, shards, first, total))
            parts = self._gather(written)
            self._together(lambda: self._end(path, hidden, parts))
        finally:
            if self._is_first and hidden.exists():
                self._disk.remove(hidden)
        return path

    def _place(self, counts: list[int]) -> int:
        """Return the place of this process among all."""
        marks = self._gather(mark := secrets.token_hex(8))
        return marks.index(mark) if len(counts) > 1 else 0

    def _together(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the work returns
        """Do something in all processes; raise in all of them if it fails in one."""

        def told() -> Any:  # noqa: ANN401
            try:
                return work()
            except OutputError:
                raise
            except OSError as error:
                place = error.filename or "the folder"
                raise OutputError(f"{place}: cannot be written: {error.strerror or error}") from error

        return in_all_processes(self._gather, told, OutputError)

    def _begin(self, path: Path, hidden: Path, *, overwrite: bool) -> None:
        if not self._is_first:
            return
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path}: is a file; choose another name")
        inside = sorted(file.name for file in path.iterdir()) if path.exists() else []
        others = [name for name in inside if not _OURS.fullmatch(name)]
        if others:
            raise OutputError(f"{path}: contains other files ({', '.join(others[:3])}); choose another folder")
        if inside and not overwrite:
            raise OutputError(f"{path}: already contains a model; choose another folder, or pass overwrite=True")
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()

    def _stored(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of this process under the names of the files."""
        check_storable(own)
        if not is_of_transformers(self._model):
            return dict(own)
        from transformers.core_model_loading import revert_weight_conversion

        model = cast("Any", self._model)
        try:
            stored: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(own))
        except Exception as error:
            raise UsageError(
                f"save_pretrained: this lane does not hold all tensors that make one tensor of a file: "
                f"{error_in_short(error)}. Cut the model between its layers, or save with a checkpoint"
            ) from error
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        return {name: tensor for name, tensor in stored.items() if not any(re.search(one, name) for one in ignored)}

    def _write_shards(
        self, hidden: Path, shards: list[dict[str, torch.Tensor]], first: int, total: int
    ) -> dict[str, Any]:
        """Write the shards; return their number of bytes and of elements, and the file of each tensor."""
        found: dict[str, Any] = {"bytes": 0, "elements": 0, "files": {}}
        for number, shard in enumerate(shards, first + 1):
            name = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            host = {key: tensor.detach().cpu().contiguous() for key, tensor in shard.items()}
            write_shard(self._disk, hidden / name, host)
            found["bytes"] += sum(tensor.nbytes for tensor in host.values())
            found["elements"] += sum(tensor.numel() for tensor in host.values())
            found["files"] |= dict.fromkeys(shard, name)
        return found

    def _end(self, path: Path, hidden: Path, parts: list[dict[str, Any]]) -> None:
        if not self._is_first:
            return
        files = {key: name for part in parts for key, name in part["files"].items()}
        if set(files.values()) != {SINGLE}:
            sums = {f"total_{what}": sum(part[key] for part in parts) for what, key in _SUMS.items()}
            text = json.dumps({"metadata": sums, "weight_map": files}, indent=2, sort_keys=True)
            self._disk.write_file(hidden / INDEX, [text.encode()])
        if is_of_transformers(self._model):
            self._write_config(hidden)
        self._disk.put(hidden, path)

    def _write_config(self, hidden: Path) -> None:
        import copy

        model = cast("Any", self._model)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config.save_pretrained(hidden)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(hidden)


_SUMS = {"size": "bytes", "parameters": "elements"}


def _shards(tensors: Mapping[str, torch.Tensor], most: float) -> Iterable[dict[str, torch.Tensor]]:
    """Divide tensors into files of at most so many bytes; a larger tensor has a file of its own."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard
