"""Inference: a model as one CUDA graph with branches, requests that stream through a model, and text generation."""

import warnings
from typing import Any

from penstock.infer.generation.generate import generate, stream_tokens
from penstock.infer.generation.generation_job import Token
from penstock.infer.generation.sampler import Sampler
from penstock.infer.graph.inference_graph import Graph
from penstock.infer.stream.request_pipeline import RequestPipeline

__all__ = ["Graph", "RequestPipeline", "Sampler", "Token", "generate", "stream_tokens"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class
    """Return the class that had another name before."""
    if name == "Pipeline":  # `penstock.Pipeline` is another class
        warnings.warn("penstock.infer.Pipeline is now penstock.infer.RequestPipeline", FutureWarning, stacklevel=2)
        return RequestPipeline
    raise AttributeError(f"module 'penstock.infer' has no attribute {name!r}")
