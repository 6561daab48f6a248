"""Graph: run a model as one CUDA graph with parallel branches."""
