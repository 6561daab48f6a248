"""Small classes: the class of transformers to build for a config; classes with a loss come first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.errors import UsageError
from penstock.model.small_models.small_config import Config

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


def class_of(config: Config, exceptions: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> type[Any]:
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
