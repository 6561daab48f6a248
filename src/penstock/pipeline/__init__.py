"""Pipeline: the object a user holds."""

from penstock.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
