"""Penstock: pipeline parallelism for PyTorch that keeps every device full."""

from penstock import errors, schedules
from penstock.explain import explain
from penstock.model.costs import Costs
from penstock.planning.cluster import Cluster, Link
from penstock.planning.simulate import simulate
from penstock.report.timeline import Timeline

__all__ = ["Cluster", "Costs", "Link", "Timeline", "errors", "explain", "schedules", "simulate"]

__version__ = "0.1.0.dev0"
