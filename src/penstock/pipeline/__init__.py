"""Pipeline: the package of the class `Pipeline` and its parts."""

from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.smaller_micro_batches import split_finer

__all__ = ["Pipeline", "split_finer"]
