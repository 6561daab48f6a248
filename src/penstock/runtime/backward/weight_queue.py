"""Weight queue: the weight gradients that are postponed from a micro-batch's I to its W."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.backward.weight_ops import Operands, Operation
from penstock.runtime.backward.weight_sources import Weight

_MANY_BYTES = 64 << 20  # of gradients to collect before one call accumulates them, since a call takes a dozen µs


class _Entry(NamedTuple):
    """A postponed weight gradient: the operation that computes it, and its operands."""

    weight: Weight
    operation: Operation
    x: Tensor
    gradient: Tensor
    version: int  # torch's version counter of x

    def compute(self) -> Tensor:
        if self.x._version != self.version:
            raise RuntimeError(
                f"an input of a {type(self.operation).__name__.lower()}, shape: {tuple(self.x.shape)}, was changed in"
                " place between I and W; change a copy of it, or use a schedule that does not split the backward"
            )
        tensor = self.weight.tensor
        return self.operation.for_weight(self.gradient, Operands(self.x, tensor.detach())).to(tensor.dtype)


class Pending:
    """The weight gradients of one stage and one micro-batch that I leaves for W.

    >>> from penstock.runtime.backward.split_backward import DeferredWeightGradients
    >>> layer, pending = nn.Linear(2, 3), Pending()
    >>> with DeferredWeightGradients(pending):
    ...     output = layer(torch.ones(4, 2))
    >>> output.sum().backward()
    >>> len(pending), layer.weight.grad
    (1, None)
    >>> pending.run()
    >>> len(pending), layer.weight.grad[0]
    (0, tensor([4., 4.]))
    """

    def __init__(self) -> None:
        # every output depends on it, and so requires a gradient even if neither input nor bias does
        self.anchor = torch.zeros((), requires_grad=True)
        self._anchor_node: Any = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self._entries: list[_Entry] = []
        self._num_checked = 0

    def __len__(self) -> int:
        return len(self._entries)

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that are held now; each storage counts once, parameters do not count."""
        parameters = [leaf for entry in self._entries for leaf in entry.weight.leaves]
        tensors = [tensor for entry in self._entries for tensor in (entry.x, entry.gradient, entry.weight.tensor)]
        parameters += [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        known = {leaf.untyped_storage().data_ptr() for leaf in parameters}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for address, size in storages.items() if address not in known)

    def is_wanted(self) -> bool:
        """Return whether the current backward is for all leaves, and not for chosen inputs, as inside a forward."""
        return torch._C._will_engine_execute_node(self._anchor_node)

    def add(self, weight: Weight, operation: Operation, x: Tensor, gradient: Tensor) -> None:
        """Postpone a weight gradient; called in I."""
        held = x.detach() if x.requires_grad and not isinstance(x, nn.Parameter) else x  # frees its graph
        entry = _Entry(weight, operation, held, gradient.detach() if gradient.requires_grad else gradient, x._version)
        if any(torch._C._will_engine_execute_node(node) for node in weight.stateful):
            # I will walk a part of this weight's graph later, because that part is older; W could not walk it again
            with torch.no_grad():
                made = entry.compute()
            torch.autograd.backward(weight.tensor, made, retain_graph=True)
            return
        if len(self._entries) == self._num_checked:
            torch.autograd.Variable._execution_engine.queue_callback(self._copy_shared)
        self._entries.append(entry)

    def _copy_shared(self) -> None:
        """At the end of I, copy gradients whose memory is shared with tensors outside of the queue.

        Autograd lets a parameter's `.grad` share memory with a gradient that it passed through views. The next
        micro-batch would add to that memory in place.
        """
        fresh, self._num_checked = range(self._num_checked, len(self._entries)), len(self._entries)
        shared = [at for at in fresh if num_holders(self._entries[at].gradient) > 1]
        if not shared:
            return
        ours: dict[int, set[int]] = {}
        for entry in self._entries:
            for tensor in (entry.x, entry.gradient, entry.x._base, entry.gradient._base):  # a view holds its base
                if tensor is not None:
                    ours.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
        copies: dict[int, Tensor] = {}
        for at in shared:
            gradient = self._entries[at].gradient
            if num_holders(gradient) > len(ours[gradient.untyped_storage()._cdata]):
                if id(gradient) not in copies:
                    copies[id(gradient)] = gradient.clone()
                self._entries[at] = self._entries[at]._replace(gradient=copies[id(gradient)])

    def run(self) -> None:
        """Compute the postponed gradients, and let autograd add them to those of the parameters: hooks run as usual."""
        entries, self._entries, self._num_checked = self._entries, [], 0
        groups = _by_leaves(entries)
        del entries  # so that the tensors of an entry are freed as soon as its gradient is computed
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        num_bytes = 0
        while groups:
            for weight, gradient in _totals(groups.pop()):
                weights.append(weight)
                gradients.append(gradient)
                num_bytes += gradient.nbytes
            if not groups or num_bytes > _MANY_BYTES:
                torch.autograd.backward(weights, gradients)
                weights, gradients, num_bytes = [], [], 0


def num_holders(tensor: Tensor) -> int:
    """Return the number of tensors that share this tensor's memory, including itself."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # one use is Python's own


def _by_leaves(entries: Iterable[_Entry]) -> list[list[_Entry]]:
    """Return the entries in groups that share no parameter, so that each parameter gets its whole gradient at once."""
    group_of: dict[int, list[_Entry]] = {}
    for entry in entries:
        found = {id(group): group for leaf in entry.weight.leaves if (group := group_of.get(id(leaf))) is not None}
        first, *others = found.values() if found else ([],)
        first.append(entry)
        for other in others:
            first += other
        for member in first if others else (entry,):
            for leaf in member.weight.leaves:
                group_of[id(leaf)] = first
    return list({id(group): group for group in group_of.values()}.values())


def _totals(entries: list[_Entry]) -> Iterable[tuple[Tensor, Tensor]]:
    """Return each weight with its gradient, summed over all its uses."""
    total_of: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        while entries:
            entry = entries.pop()
            weight, made = entry.weight.tensor, entry.compute()
            if id(weight) in total_of:
                total_of[id(weight)][1].add_(made)
            else:
                total_of[id(weight)] = weight, made
    return total_of.values()
