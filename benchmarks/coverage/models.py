"""All models of this benchmark that need only torch; importing their files registers them."""

import control  # noqa: F401
import images  # noqa: F401
import patterns  # noqa: F401
import plain  # noqa: F401
import state  # noqa: F401
import torch_nn  # noqa: F401
import values  # noqa: F401
from registry import BATCH, ENTRIES

__all__ = ["BATCH", "ENTRIES"]
