"""Inference: a model as one CUDA graph with parallel branches, and requests that stream through it."""

from penstock.infer.graphs import Graph
from penstock.infer.pipeline import Pipeline

__all__ = ["Graph", "Pipeline"]
