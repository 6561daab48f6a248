"""Inference: a model as one CUDA graph with branches, requests that stream through a model, and text generation."""

from penstock.infer.generation.generate import generate, stream_tokens
from penstock.infer.generation.generation_job import Token
from penstock.infer.generation.sampler import Sampler
from penstock.infer.graph.inference_graph import Graph
from penstock.infer.stream.request_pipeline import Pipeline

__all__ = ["Graph", "Pipeline", "Sampler", "Token", "generate", "stream_tokens"]
