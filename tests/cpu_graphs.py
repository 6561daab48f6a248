"""Graphs that run on a CPU: what a capture does, without a GPU, so that what is built on graphs can be tested."""

from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class CpuGraphs(TorchDispatchMode):
    """Writes down every operation; a replay does them again, into the same memory.

    Like a CUDA graph, a capture leaves what was there before as it was, and a replay knows nothing of Python.
    """

    num_replays = 0

    @contextmanager
    def capturing(self, generators):
        self._tape, self._before, self._own = [], {}, []
        tape = self._tape
        with self:
            yield lambda: self._replay(tape)
        with torch.no_grad():
            for tensor, values in self._before.values():
                tensor.data.copy_(values)  # not a change that autograd would ask about

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for value in pytree.tree_leaves((args, kwargs)):
            # batch norm does not say that it changes its running statistics
            may_change = func._schema.is_mutable or "batch_norm" in func._schema.name
            if may_change and isinstance(value, torch.Tensor):
                key = _storage(value)
                if key not in self._before and all(_storage(own) != key for own in self._own):
                    self._before[key] = (value, value.clone())
        made = func(*args, **kwargs)
        given = {id(value) for value in pytree.tree_leaves((args, kwargs))}
        self._own += [v for v in pytree.tree_leaves(made) if isinstance(v, torch.Tensor) and id(v) not in given]
        self._tape.append((func, args, kwargs, made))
        return made

    @staticmethod
    @torch.inference_mode(False)
    @torch.autocast("cpu", enabled=False)
    @torch.no_grad()
    def _replay(tape):
        CpuGraphs.num_replays += 1
        for func, args, kwargs, made in tape:
            given = {_storage(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and _storage(old) not in given:
                    old.copy_(new)


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()
