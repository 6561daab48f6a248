"""Exchange: import and export weights as safetensors files, Hugging Face folders, DCP checkpoints and .pt files."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.checkpoint.formats.dcp import METADATA, load_tensors, read_dcp, write_dcp
from penstock.checkpoint.reader import read_state
from penstock.checkpoint.save_job import INDEX, Job, Saving
from penstock.errors import CheckpointError, OutputError, UsageError
from penstock.tensor_files.disk import Disk
from penstock.tensor_files.manifest import FILE_NAME, MANIFEST, Manifest, folder_name, is_folder_name, read_json
from penstock.tensor_files.tensor_shards import Shard, check_storable, write_shard

Form = Literal["safetensors", "huggingface", "dcp"]
FORMS: tuple[Form, ...] = ("safetensors", "huggingface", "dcp")
_EXPORTED = re.compile(r"model.*\.safetensors(?:\.index\.json)?|config\.json|\.metadata|.*\.distcp")
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Moved:
    """The result of an export or import."""

    path: Path
    num_tensors: int
    num_bytes: int


# ---- export


def export_checkpoint(
    manifest: Manifest, target: str | Path, *, form: Form, config: str | Path | None = None, force: bool = False
) -> Moved:
    """Write the model of a checkpoint in another format; every tensor is checked.

    Args:
        manifest: the manifest of the checkpoint.
        target: a file for "safetensors", a folder for the other forms.
        form: "safetensors" (one file, all names of the state dict), "huggingface" (model*.safetensors with their
            index), or "dcp" (torch.distributed.checkpoint).
        config: for "huggingface", a config.json to copy next to the weights.
        force: overwrite an earlier export.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        OutputError: if the target exists, would replace something else, or cannot be written.
        UsageError: for an invalid form or config.
    """
    path = Path(target)
    if form not in FORMS:
        raise UsageError(f"form: {form!r} is not one of {', '.join(FORMS)}")
    if config is not None and form != "huggingface":
        raise UsageError("config: only form='huggingface' takes a config")
    if config is not None:
        read_json(Path(config))
    try:
        _check_target(path, manifest.folder, form, force=force)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror or error}") from error
    hidden = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    disk = Disk()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count, num_bytes = _WRITERS[form](manifest, hidden, disk)
        if config is not None:
            shutil.copyfile(config, hidden / "config.json")
        disk.put(hidden, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if hidden.exists():
            disk.remove(hidden)
    return Moved(path, count, num_bytes)


def _check_target(path: Path, source: Path, form: Form, *, force: bool) -> None:
    """Check that an export replaces nothing but an earlier export, with or without `force`."""
    if path.name in ("", ".."):
        raise OutputError(f"{path}: give the name of a new {'file' if form == 'safetensors' else 'folder'}")
    real, source = path.parent.resolve() / path.name, source.resolve()
    places = {real, real.resolve()}
    if any(source == place or source in place.parents or place in source.parents for place in places):
        raise OutputError(f"{path}: overlaps {source}, the checkpoint to export; choose another path")
    is_there = path.exists() or path.is_symlink()
    run = source.parent  # the training's folder, unless the checkpoint was copied elsewhere
    is_inside = (run / "latest").exists() and any(run in place.parents for place in places)
    is_checkpoint = is_folder_name(path.name) or any((place / MANIFEST).exists() for place in real.parents)
    if (is_inside and is_there) or is_checkpoint:
        raise OutputError(f"{path}: belongs to a training or its checkpoints; choose another path")
    if not is_there:
        return
    if not force:
        raise OutputError(f"{path}: already exists; choose another name, or pass force=True (--force)")
    if path.is_dir() and form == "safetensors":
        raise OutputError(f"{path}: is a folder, but {form} writes a file; choose another name")
    inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    others = sorted(one.name for one in inside if one.is_dir() or not _EXPORTED.fullmatch(one.name))
    if others:
        raise OutputError(
            f"{path}: contains files that no export writes ({', '.join(others[:3])}); choose another path"
        )


def _tensors(manifest: Manifest, file: str) -> dict[str, torch.Tensor]:
    with Shard(manifest.folder / file, manifest.files[file]) as shard:
        return {name: shard.read(name) for name in shard.tensors}


def _whole(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the model's state dict, with all names."""
    read_state(manifest)
    tensors = {name: t for file in manifest.shards("model") for name, t in _tensors(manifest, file).items()}
    return tensors | {alias: tensors[name] for alias, name in manifest.aliases.items() if name in tensors}


def _write_safetensors(manifest: Manifest, path: Path, disk: Disk) -> tuple[int, int]:
    tensors = _whole(manifest)
    return len(tensors), int(write_shard(disk, path, tensors)["bytes"])


def _write_huggingface(manifest: Manifest, path: Path, disk: Disk) -> tuple[int, int]:
    path.mkdir()
    files = [file for file in manifest.shards("model") if manifest.files[file]["tensors"]]
    num_bytes, total = 0, 0
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        entry = write_shard(disk, path / name, _tensors(manifest, file))
        num_bytes, total = num_bytes + entry["bytes"], total + entry["bytes"] - entry["header_bytes"]
        weight_map |= dict.fromkeys(entry["tensors"], name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        disk.write_file(path / INDEX, [json.dumps(index, indent=2, sort_keys=True).encode()])
    return len(weight_map), num_bytes


def _write_dcp(manifest: Manifest, path: Path, disk: Disk) -> tuple[int, int]:
    tensors = _whole(manifest)
    disk.make_folder(path)
    write_dcp(tensors, path)
    return len(tensors), sum(file.stat().st_size for file in path.iterdir())


_WRITERS = {"safetensors": _write_safetensors, "huggingface": _write_huggingface, "dcp": _write_dcp}


# ---- import


def import_weights(
    source: str | Path, folder: str | Path, *, step: int = 0, prefix: str = "", key: str | None = None
) -> Moved:
    """Make a checkpoint from weights in another format, for `Checkpoints.restore`.

    It contains only the model: the optimizer, the learning rate and the rest start anew. No code of the source runs.

    Args:
        source: a safetensors file, a Hugging Face folder, a folder of torch.distributed.checkpoint, or a .pt file with
            a state dict.
        folder: the folder of the checkpoints.
        step: the step of the new checkpoint.
        prefix: take only names with this prefix and remove it, for example "model." for {"model": state_dict}.
        key: the key of the state dict within a .pt file, if the file contains more.

    Raises:
        CheckpointError: if the source is damaged, or contains code that could run.
        OutputError: if the step already has a checkpoint, or the new one cannot be written.
    """
    path, folder = Path(source), Path(folder)
    final = folder / folder_name(step)
    if final.exists():
        raise OutputError(f"{final}: already exists; choose another step or folder")
    tensors = {name: tensor.contiguous() for name, tensor in _chosen(_read(path, key), prefix, path).items()}
    check_storable(tensors)
    files = {"model-00001-of-00001.safetensors": tensors}
    state = {
        "step": step, "notes": {"imported_from": str(path)}, "schedulers": [], "scaler": None, "data": None,
        "has_optimizer": False,
    }  # fmt: skip
    part: dict[str, Any] = {"groups": [], "params": {}, "random": None}
    job = Job(folder, secrets.token_hex(4), step, 0, 1, files, part, state, {}, {}, None, (), 60.0)
    saving = Saving(job, Disk())
    saving.wait()
    if not saving.is_complete:
        saving.clear()
        raise OutputError(f"{final}: cannot be written: {saving.failure}")
    return Moved(final, len(tensors), job.num_bytes)


def _read(path: Path, key: str | None) -> Mapping[str, torch.Tensor]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    is_torch = path.is_file() and path.suffix in _TORCH_ENDINGS
    if key is not None and not is_torch:
        raise UsageError("key: only a .pt file takes a key")
    if is_torch:
        return _state_dict(load_tensors(path, str(path)), key, path)
    if path.is_file():
        return dict(_safetensors(path))
    if (path / MANIFEST).exists():
        raise UsageError(f"{path}: is already a Penstock checkpoint; restore() loads it directly")
    if (path / METADATA).exists():
        return read_dcp(path)
    return _huggingface(path)


def _chosen(tensors: Mapping[str, torch.Tensor], prefix: str, path: Path) -> dict[str, torch.Tensor]:
    chosen = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if not chosen:
        some = ", ".join(list(tensors)[:5]) or "none"
        raise CheckpointError(f"{path}: no tensor name begins with {prefix!r}; existing names: {some}")
    return chosen


def _safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a valid safetensors file: {error!s:.200}") from error


def _huggingface(path: Path) -> dict[str, torch.Tensor]:
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{path / INDEX}: has no weight_map")
        files = sorted(set(map(str, weight_map.values())))
        bad = next((name for name in files if not FILE_NAME.fullmatch(name)), None)
        if bad is not None:
            raise CheckpointError(f"{path / INDEX}: {bad!r:.80} is not a valid file name")
    else:
        weight_map, files = None, sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path}: contains neither *.safetensors files nor a checkpoint of torch.distributed.checkpoint"
        )
    tensors = {name: tensor for file in files for name, tensor in _safetensors(path / file)}
    missing = sorted((weight_map or {}).keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{path}: the files lack tensors that the index lists: {', '.join(missing[:5])}")
    return tensors


def _state_dict(found: Any, key: str | None, path: Path) -> dict[str, torch.Tensor]:  # noqa: ANN401
    if key is not None:
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise CheckpointError(f"{path}: has no {key!r}")
            found = found[part]
    if not isinstance(found, Mapping) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        keys = ", ".join(map(str, list(found)[:10])) if isinstance(found, Mapping) else type(found).__name__
        raise CheckpointError(
            f"{path}: is not a state dict; it contains: {keys}. Give the key of the state dict (--key)"
        )
    return {str(name): tensor.detach() for name, tensor in found.items()}
