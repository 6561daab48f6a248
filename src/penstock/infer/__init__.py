"""Inference: run a model as one CUDA graph with parallel branches, and stream requests through it."""

from penstock.infer.graph.inference_graph import Graph
from penstock.infer.stream.request_pipeline import Pipeline

__all__ = ["Graph", "Pipeline"]
