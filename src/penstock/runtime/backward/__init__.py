"""Backward: split into input gradients and weight gradients."""
