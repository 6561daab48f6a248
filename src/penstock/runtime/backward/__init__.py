"""Backward: its split into input gradients and weight gradients, and the accumulation of gradients."""
