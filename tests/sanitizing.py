"""Tests under torch's sanitizer for races: which of them cannot be, and why."""

import os

import pytest


def not_sanitized(reason):
    """Leave a test out where the sanitizer is on."""
    return pytest.mark.skipif("TORCH_CUDA_SANITIZER" in os.environ, reason=f"the sanitizer: {reason}")
