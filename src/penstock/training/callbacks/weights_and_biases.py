"""Weights & Biases: a callback that logs the figures of a training to a run of wandb, which must be installed."""

# ruff: noqa: ARG002
# (callbacks ignore some arguments)

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.training.callbacks.callback import Callback, Summary
from penstock.training.callbacks.charts import charted, charted_validation

if TYPE_CHECKING:
    from penstock.training.trainer import Trainer

_ID = "wandb_id"


class WeightsAndBiases(Callback):
    """Logs what `TensorBoard` writes to a run of Weights & Biases; only the first process logs.

    Without a network, set `mode="offline"`: the files go to `wandb/` in the run folder, and `wandb sync` uploads them
    later. A training that resumes continues its run.

    Args:
        options: the arguments of `wandb.init`, such as `project`, `name` and `mode`. By default, `dir` is the run
            folder, `id` is a new one that the run folder keeps, and `config` is the plan.

    Raises:
        UsageError: if wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - as wandb.init
        if find_spec("wandb") is None:
            raise UsageError("Weights & Biases is not installed; run: pip install wandb")
        self._options = options
        self._run: Any = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Start the run, or continue it."""
        if not trainer.is_first:
            return
        self.close()
        schedule = trainer.pipe.schedule
        config = {
            "schedule": schedule.name,
            "lanes": schedule.num_lanes,
            "stages": schedule.num_stages,
            "micro_batches": schedule.num_mbs,
            "cuts": list(trainer.pipe.cuts),
            "steps": trainer.options.steps,
        }
        folder = trainer.folder.path
        given = {"dir": str(folder), "id": _run_id(trainer), "resume": "allow", "config": config, **self._options}
        self._run = import_module("wandb").init(**given)

    def on_log(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Log the figures of a step."""
        self._log(dict(charted(figures)), trainer.step)

    def on_evaluate(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Log the result of a validation."""
        self._log(dict(charted_validation(figures)), trainer.step)

    def on_train_end(self, trainer: Trainer, summary: Summary) -> None:
        """End the run."""
        if self._run is not None:
            self._run.summary["status"] = summary.status
        self.close()

    def close(self) -> None:
        """End the run, also after an error."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _log(self, figures: dict[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log(figures, step=step)


def _run_id(trainer: Trainer) -> str:
    """Return the id of the run in wandb; a training that resumes in the folder has the same one."""
    path = trainer.folder.path / _ID
    if not path.exists():
        trainer.folder.write(_ID, secrets.token_hex(8))
    return path.read_text().strip()
