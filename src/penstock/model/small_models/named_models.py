"""Named models: `package.module:callable`, `file.py:callable`, or a small random model of a transformers family."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import UsageError, error_in_short, nearest
from penstock.model.small_models.folder_model import folder_of, model_from_folder
from penstock.model.small_models.small_config import Config

if TYPE_CHECKING:
    from torch import nn

Exceptions = Mapping[str, Mapping[str, Any]]  # by model type

# the first of these mappings of transformers that contains the config determines the class
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "CAUSAL_IMAGE_MODELING",
    "RNNT",
    "TDT",
    "PRETRAINING",
    "VISUAL_QUESTION_ANSWERING",
    "UNIVERSAL_SEGMENTATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "MASK_GENERATION",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
    "SEQUENCE_CLASSIFICATION",
)


def load(
    name: str, *, batch_size: int | None = None, seed: int = 0, exceptions: Exceptions = MappingProxyType({})
) -> tuple[nn.Module, Any]:
    """Return a model and an example batch.

    Args:
        name: `package.module:callable` or `file.py:callable`; the callable returns a model, or a model and an example.
            It may also be a model class. `hf:FOLDER` is the model that `save_pretrained` wrote to a folder, on meta:
            its weights are not read. Any other name is a model type of transformers (`gpt2`, `t5`, `clip`), for
            which a small model with random weights is built.
        batch_size: the batch size of the example, if Penstock makes it; by default 4.
        seed: the seed of the parameters and of the example; the global random state is preserved.
        exceptions: for model types of transformers to which the general rules do not apply: `config` sets attributes,
            `class` names the class to build, and `batch` sets inputs.

    Returns:
        The model, and the example: a tensor, a tuple of arguments or a dict of keyword arguments; None if the
        callable returned no example.

    Raises:
        UsageError: if the model does not exist, or cannot be built.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        folder = folder_of(name)
        if folder is not None:
            return _from_folder(folder, batch_size or 4)
        if ":" in name:
            return _from_code(name)
        if name.endswith(".py"):
            raise UsageError(f"name the callable in the file that returns the model: {name}:callable; given: {name!r}")
        return _from_transformers(name, batch_size or 4, exceptions)


def find(name: str) -> Any:  # noqa: ANN401 - a function or a class
    """Return the function or class that `package.module:callable` or `file.py:callable` names.

    Raises:
        UsageError: if it does not exist, or cannot be called.
    """
    place, _, attribute = name.rpartition(":")
    module = _file(place) if place.endswith(".py") else _module(place)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise UsageError(f"{place} has no {attribute!r}.{nearest(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name} is {_article(found)}, not a function or a class")
    return found


def _from_folder(folder: str, batch_size: int) -> tuple[nn.Module, Any]:
    from penstock.model.small_models.small_batch import batch_for

    model = model_from_folder(folder, {})
    try:
        return model.train(), batch_for(model, batch_size=batch_size, exceptions=MappingProxyType({}))
    except Exception as error:
        raise UsageError(
            f"{folder}: cannot make an example batch for a {type(model).__name__}: {error_in_short(error)}"
        ) from error


def _from_code(name: str) -> tuple[nn.Module, Any]:
    from torch import nn

    found = find(name)
    try:
        made = found if isinstance(found, nn.Module) else found()
    except Exception as error:
        raise UsageError(f"{name} failed: {error_in_short(error)}") from error
    return checked(name, made)


def checked(name: str, made: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401 - the result of the callable
    """Return the model and the example batch (or None) that a callable returned.

    Raises:
        UsageError: if it returned anything else.
    """
    from torch import nn

    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    is_list = isinstance(model, list) and bool(model) and all(isinstance(part, nn.Module) for part in model)
    if not isinstance(model, nn.Module) and not is_list:
        raise UsageError(
            f"{name} returned {_article(made)}; it must return a model (or a list of stage modules),"
            " or a pair of a model and an example"
        )
    return cast("nn.Module", model), example


def _article(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}, the working directory"
        raise UsageError(f"no file {place}{where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{place} is not a Python file")
    _let_import_from(path.resolve().parent)  # it can import the files beside it, as a script can
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{place} cannot be imported: {error_in_short(error)}") from error
    return module


def _let_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module(place: str) -> ModuleType:
    _let_import_from(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(f"no module {place!r}: {error.name!r} is not installed, and not in this folder") from error
        raise UsageError(f"{place} cannot be imported: no module {error.name!r}") from error
    except Exception as error:
        raise UsageError(f"{place} cannot be imported: {error_in_short(error)}") from error


def config_of(name: str) -> Any:  # noqa: ANN401 - a config of transformers
    """Return the default config of a model type of transformers.

    Raises:
        UsageError: if transformers is not installed, or does not have this type.
    """
    try:
        from transformers import AutoConfig
        from transformers.models.auto import configuration_auto
    except ImportError as error:
        raise UsageError(
            f"{name!r} names a model of transformers, which is not installed: pip install 'penstock[hf]', "
            "or name a model of your own as module:callable"
        ) from error
    known: Mapping[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    if name not in known:
        raise UsageError(
            f"no model {name!r}: neither module:callable nor a model type of transformers.{nearest(name, known)}"
        )
    return AutoConfig.for_model(name)


def class_of(config: Config, exceptions: Exceptions = MappingProxyType({})) -> type[Any]:
    """Return the model class to build for a config.

    Raises:
        UsageError: if transformers has none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    name = exceptions.get(kind, {}).get("class")
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in TASKS]
    for mapping in [*mappings, modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES]:
        if name is None and kind in mapping:
            name = mapping[kind] if isinstance(mapping[kind], str) else mapping[kind][0]
    if name is not None and hasattr(transformers, name):
        found: type[Any] = getattr(transformers, name)
        return found
    return _in_its_module(config, name)


def _in_its_module(config: Config, name: str | None) -> type[Any]:
    """Return a class from the module of a config that no mapping contains, such as that of a part of a model."""
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise UsageError(f"transformers has no model for {config.model_type!r}") from error
    classes = [found for found in vars(module).values() if isinstance(found, type) and hasattr(found, "config_class")]
    classes = [
        found for found in classes if found.__module__ == path and not found.__name__.endswith("PreTrainedModel")
    ]
    fitting = [found for found in classes if _takes(found) in ("", type(config).__name__)]
    fitting = [found for found in fitting if _takes(found) or found.config_class is type(config)]
    if name is not None:
        fitting = [found for found in classes if found.__name__ == name]
    if not fitting:
        raise UsageError(f"transformers has no model for {config.model_type!r}")
    return max(fitting, key=lambda found: ("For" in found.__name__, found.__name__.endswith("Model")))


def _takes(found: type[Any]) -> str:
    """Return the name of the config class that the constructor of a class takes; empty if it is unknown."""
    entry = inspect.signature(found.__init__).parameters.get("config")
    if entry is None or entry.annotation is entry.empty:
        return ""
    return entry.annotation if isinstance(entry.annotation, str) else getattr(entry.annotation, "__name__", "")


def _from_transformers(name: str, batch_size: int, exceptions: Exceptions) -> tuple[nn.Module, Any]:
    import torch

    plain = config_of(name)
    from penstock.model.small_models.small_batch import batch_for
    from penstock.model.small_models.small_config import shrunk

    try:
        config = shrunk(plain, exceptions)
        model = class_of(config, exceptions)(config)
        example = batch_for(model, batch_size=batch_size, exceptions=exceptions)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(**example)  # fails here if it cannot run; evaluation changes no running averages
    except Exception as error:
        raise UsageError(
            f"cannot build a small {name!r}: {error_in_short(error)}; build it in a function of your own instead, and"
            " name this function as module:callable"
        ) from error
    return model.train(), example
