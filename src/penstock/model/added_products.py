"""Added products: what a compiled backward gives to a weight is added to its gradient by the product that makes it.

A product can add what it makes to what is in memory, as it writes it. Otherwise it writes a gradient, and a kernel
behind it reads that, and the sum so far, and writes the sum. Who runs a backward says which weights have a sum
(`adding_to`); for others the operation makes the product alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

__all__ = ["OPERATION", "adding_to"]

_sums: dict[int, torch.Tensor] = {}  # by where the weight is in memory: lanes add entries of their own
_done: set[int] = set()

_library = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_library.define("add_product(Tensor given, Tensor rows, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]


def _add_product(given: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient, or memory that nobody reads, where it was added to the sum.

    Args:
        given: the gradient of what the weight made, a row for each sample.
        rows: what the weight was multiplied with.
        weight: itself.
    """
    key = weight.data_ptr()
    total = _sums.get(key)
    if total is None:
        return given.t() @ rows
    total.addmm_(given.t(), rows)
    _done.add(key)
    return torch.empty_like(weight, requires_grad=False)


def _shaped(given: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    del rows
    return given.new_empty(weight.shape)


_library.impl("add_product", _add_product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("penstock::add_product", _shaped, lib=_library)
OPERATION = torch.ops.penstock.add_product.default


@contextmanager
def adding_to(sums: Mapping[int, torch.Tensor]) -> Iterator[set[int]]:
    """Let products of this process add to sums, by where the weights are in memory; yield which of them did so."""
    _sums.update(sums)
    found: set[int] = set()
    try:
        yield found
    finally:
        for key in sums:
            _sums.pop(key, None)
            if key in _done:
                _done.discard(key)
                found.add(key)
