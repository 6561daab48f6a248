"""Measured: a profile is kept in the run folder, so that processes that are started again need not measure anew."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock import __version__

if TYPE_CHECKING:
    from penstock.launch.config import Config
    from penstock.pipeline.pipeline import Pipeline

__all__ = ["keep_profile", "kept_profile"]

_NAME = "profile.json"
_KEY = "profile_of"  # in plan.json


def keep_profile(pipe: Pipeline, config: Config, lanes: int | None) -> dict[str, Any]:
    """Write what was measured into the run folder, if anything was; return what plan.json says of it."""
    if pipe._decision.predicted() is None:
        before = kept_profile(config, lanes)  # a plan was used again: what it was made by is still there
        return {} if before is None else {_KEY: _key(config, lanes)}
    pipe.explain().profile.save(Path(config.folder) / _NAME)
    return {_KEY: _key(config, lanes)}


def kept_profile(config: Config, lanes: int | None) -> Path | None:
    """Return the profile that processes before these have measured for the same; None where there is none."""
    folder = Path(config.folder)
    try:
        plan = json.loads((folder / "plan.json").read_text())
    except (OSError, ValueError):
        return None
    is_same = isinstance(plan, dict) and plan.get(_KEY) == _key(config, lanes)
    return folder / _NAME if is_same and (folder / _NAME).is_file() else None


def _key(config: Config, lanes: int | None) -> str:
    """Return a short name of all that a profile may depend on."""
    told = [config.model_dump(mode="json"), lanes, torch.__version__, __version__]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]
