"""Folder model: a model of transformers on meta, built from the config.json of a folder; its weights are not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import UsageError, error_in_short

PREFIX = "hf:"  # in the name of a model: hf:FOLDER


def folder_of(name: object) -> str | None:
    """Return the folder that a model's name refers to; None if it is another kind of name."""
    return name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else None


def model_from_folder(folder: str, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a PreTrainedModel
    """Return the model that a folder of `save_pretrained` describes, on meta; no code from the folder runs.

    Args:
        folder: the folder, with a config.json.
        settings: settings of the config to replace; `dtype` is the dtype of the parameters, by default float32.

    Raises:
        UsageError: if the folder has no valid config, or transformers has no such model.
    """
    import torch

    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: has no config.json; give a folder that save_pretrained wrote")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{PREFIX}{folder} needs transformers, which is not installed: pip install 'penstock[hf]'"
        ) from error
    given = dict(settings)
    dtype = _dtype_of(given.pop("dtype", "float32"))
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **given)
    except Exception as error:
        raise UsageError(f"{path}: its config.json cannot be read: {error_in_short(error)}") from error
    config.use_cache = False  # the cache is for generation; training does not use it
    kind = _class_of(config, path)
    try:
        with _default_dtype(dtype), torch.device("meta"):
            return kind(config)
    except Exception as error:
        raise UsageError(f"{path}: cannot build a {kind.__name__}: {error_in_short(error)}") from error


def _class_of(config: Any, path: Path) -> type[Any]:  # noqa: ANN401 - a config of transformers
    import transformers

    from penstock.model.small_models.named_models import class_of

    names = getattr(config, "architectures", None) or ()
    for name in names:
        if hasattr(transformers, name):
            found: type[Any] = getattr(transformers, name)
            return found
    if names:
        raise UsageError(f"{path}: transformers has no class {names[0]}; models with code of their own are not loaded")
    return class_of(config)


def _dtype_of(name: object) -> Any:  # noqa: ANN401 - a torch.dtype
    import torch

    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype: {name!r} is not a floating-point dtype of torch, such as float32 or bfloat16")
    return found


@contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:  # noqa: ANN401 - a torch.dtype
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
