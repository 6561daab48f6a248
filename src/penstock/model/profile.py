"""Profile: what each node of a graph takes, in seconds and bytes, for one micro-batch. Pure data; measured elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.model.graph import Graph

__all__ = ["Profile"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """What each node of a graph takes; one number a node in every array.

    Attributes:
        graph: whose nodes these are.
        batch_size: the samples of the micro-batch that was measured.
        forward: seconds.
        input_grad: seconds of the gradient of the inputs.
        weight_grad: seconds of the gradient of the parameters.
        saved_bytes: what the forward keeps for the backward.
        pending_bytes: what the input gradient leaves for the weight gradient.
        optimizer_bytes: optimizer state for each byte of a trainable parameter (2.0 for Adam in the same precision).
        device: what was measured, in words.
        method: "measured" or "analytic".
    """

    graph: Graph
    batch_size: int
    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    saved_bytes: Floats
    pending_bytes: Floats
    optimizer_bytes: float = 2.0
    device: str = ""
    method: str = "measured"
