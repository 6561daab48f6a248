"""Tests under torch's sanitizer for races."""

import os

SANITIZED = "TORCH_CUDA_SANITIZER" in os.environ
