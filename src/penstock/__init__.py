"""Penstock: pipeline parallelism for PyTorch that keeps every device full."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock import errors, schedules
from penstock._version import __version__ as __version__
from penstock.deciding.cut_request import explain
from penstock.deciding.plan import Plan
from penstock.metrics import Metrics
from penstock.model.costs import Costs
from penstock.planning.cluster import Cluster, Link
from penstock.planning.simulate import simulate
from penstock.report.timeline import Timeline

if TYPE_CHECKING:
    from penstock import doctor, infer, timing
    from penstock.checkpoint import Checkpoints
    from penstock.feeding.feed import feed
    from penstock.loading.empty_weights import empty_weights
    from penstock.pipeline import Pipeline
    from penstock.pipeline.planned.make_plan import plan
    from penstock.training import Callback, Trainer

__all__ = [
    "Callback",
    "Checkpoints",
    "Cluster",
    "Costs",
    "Link",
    "Metrics",
    "Pipeline",
    "Plan",
    "Timeline",
    "Trainer",
    "doctor",
    "empty_weights",
    "errors",
    "explain",
    "feed",
    "infer",
    "plan",
    "schedules",
    "simulate",
    "timing",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401, PLR0911 - a class, a function or a module; one return for each
    """Import names that need torch on first use, so that planning and simulation work without torch."""
    if name == "Pipeline":
        from penstock.pipeline import Pipeline

        return Pipeline
    if name == "plan":
        from penstock.pipeline.planned.make_plan import plan

        return plan
    if name == "Checkpoints":
        from penstock.checkpoint import Checkpoints

        return Checkpoints
    if name == "empty_weights":
        from penstock.loading.empty_weights import empty_weights

        return empty_weights
    if name == "feed":
        from penstock.feeding.feed import feed

        return feed
    if name in ("Callback", "Trainer"):
        from penstock import training

        return getattr(training, name)
    if name in ("doctor", "infer", "timing"):
        return import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
