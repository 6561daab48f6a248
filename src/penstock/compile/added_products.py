"""Added products: what a compiled backward gives to a weight is added to its gradient by the product that makes it.

A product can add what it makes to what is in memory, as it writes it. Otherwise it writes a gradient, and a kernel
behind it reads that, and the sum so far, and writes the sum. Who runs a backward says which weights have a sum
(`adding_to`); for others the operation makes the product alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

__all__ = ["OPERATION", "Sum", "adding_to"]


class Sum:
    """The sum of a weight's gradients so far, while a backward runs.

    Args:
        weight: whose gradients they are.
        total: the sum.

    Attributes:
        task: what tells the backward from others that run within it, as in a hook; None until it is known.
        returned: what autograd got in place of the gradient that was added.
    """

    __slots__ = ("returned", "task", "total", "weight")

    def __init__(self, weight: torch.Tensor, total: torch.Tensor) -> None:
        self.weight, self.total = weight, total
        self.task: int | None = None
        self.returned: torch.Tensor | None = None

    def is_untouched(self) -> bool:
        """Return whether what was returned is all that autograd has put in the place of the gradient since."""
        now = self.weight.grad
        return (
            self.returned is not None
            and now is not None
            and now.data_ptr() == self.returned.data_ptr()
            and now._version == 0
        )


_sums: dict[int, Sum] = {}  # by the id of the weight: lanes add entries of their own

_library = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_library.define("add_product(Tensor given, Tensor rows, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]


def _add_product(given: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient, or memory that nobody reads, where it was added to the sum.

    Args:
        given: the gradient of what the weight made, a row for each sample.
        rows: what the weight was multiplied with.
        weight: itself.
    """
    found = _sums.get(id(weight))
    if found is None or found.weight is not weight or found.returned is not None or found.task != _task():
        return given.t() @ rows
    found.total.addmm_(given.t(), rows)
    made = torch.empty_like(weight, requires_grad=False)
    found.returned = made.detach()
    return made


def _shaped(given: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    del rows
    return given.new_empty(weight.shape)


_library.impl("add_product", _add_product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("penstock::add_product", _shaped, lib=_library)
OPERATION = torch.ops.penstock.add_product.default


@contextmanager
def adding_to(sums: Mapping[int, Sum], outputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let products add to sums, by the ids of weights, in a backward of outputs that is run inside."""

    def note(gradient: torch.Tensor) -> None:
        del gradient
        for one in sums.values():
            one.task = _task() if one.task is None else one.task

    hooks = [output.register_hook(note) for output in outputs] if sums else []  # type: ignore[no-untyped-call]
    _sums.update(sums)
    try:
        yield
    finally:
        for key in sums:
            _sums.pop(key, None)
        for hook in hooks:
            hook.remove()


def _task() -> int:
    """Return the number of the backward that this thread works for; one within another has a number of its own."""
    return int(torch._C._current_graph_task_id())
