"""Tensor files: safetensors files and checkpoints on disk, read and written safely."""
