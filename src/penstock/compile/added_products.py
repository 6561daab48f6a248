"""Added products: matrix products in a compiled backward that add their result to the existing weight gradient.

A matrix product can add its result to memory while it writes. Otherwise it writes a new gradient, and a kernel after it
reads this gradient and the sum so far, and writes the new sum. The caller of a backward names the weights that have a
sum (`adding_to`); for other weights the operation only computes the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch


class Sum:
    """The sum of a weight's gradients so far, while a backward runs.

    Args:
        weight: the weight.
        total: the sum.

    Attributes:
        task: the number of the backward; a nested backward, as in a hook, has another one. None until it is known.
        returned: the tensor that autograd got in place of the added gradient.
    """

    __slots__ = ("returned", "task", "total", "weight")

    def __init__(self, weight: torch.Tensor, total: torch.Tensor) -> None:
        self.weight, self.total = weight, total
        self.task: int | None = None
        self.returned: torch.Tensor | None = None

    def is_untouched(self) -> bool:
        """Return whether the weight's `.grad` is exactly the tensor that autograd got, with nothing added to it."""
        now = self.weight.grad
        return (
            self.returned is not None
            and now is not None
            and now.data_ptr() == self.returned.data_ptr()
            and now._version == 0
        )


_sums: dict[int, Sum] = {}  # by the id of the weight; each lane adds its own entries

_library = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_library.define("add_product(Tensor given, Tensor rows, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]


def _add_product(given: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient; if it was added to the sum instead, return memory that is never read.

    Args:
        given: the gradient of the output, one row per sample.
        rows: the input that was multiplied with the weight.
        weight: the weight.
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
    """Let products add to `sums`, by the id of the weight, in a backward of `outputs` that runs inside the block."""

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
    """Return the number of the backward that this thread works for; a nested backward has its own number."""
    return int(torch._C._current_graph_task_id())
