"""Split backward: splits a stage's backward into I and W by deferring the weight gradients of its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.errors import UsageError
from penstock.runtime.backward.weight_calls import SIGNATURES, Call, read_call
from penstock.runtime.backward.weight_ops import Operands, Operation
from penstock.runtime.backward.weight_queue import Pending
from penstock.runtime.backward.weight_sources import Weight, is_plain

_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = Mapping[str, Any]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class DeferredWeightGradients(TorchFunctionMode):
    """A mode in which the weight gradients of the called operations go to a queue.

    `with DeferredWeightGradients(pending): outputs = stage(*inputs)` is the forward,
    `torch.autograd.backward(outputs, gradients)` is I, and `pending.run()` is W. Until W, neither inputs nor gradients
    may be overwritten.

    An operation runs unchanged in these cases:

    - Its weight requires no gradient, or no graph is recorded.
    - The stage itself has set hooks for saved tensors: a checkpoint in the model runs its part again, without this
      mode.
    - It runs under a transform of torch.func, or in compiled code.

    Args:
        pending: the queue of the micro-batch.
        own_hooks: the number of hooks for saved tensors that the runtime has set when the mode is entered.
    """

    def __init__(self, pending: Pending, *, own_hooks: int = 0) -> None:
        super().__init__()
        self._pending, self._own_hooks = pending, own_hooks
        self._hooks: tuple[Any, Any] | None = None
        self._leaves: set[int] = set()  # ids of the parameters whose gradients are deferred

    def __enter__(self) -> Self:
        self._hooks = _top_hooks(True) if self._own_hooks else None
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: _Function, _: object, args: _Args = (), kwargs: _Kwargs | None = None) -> Any:  # noqa: ANN401 - any result
        """Run a function of torch; defer its weight gradient if it has one."""
        handle = _HANDLERS.get(func)
        if handle is None or torch.compiler.is_compiling():
            return func(*args, **kwargs) if kwargs else func(*args)
        return handle(self, func, args, kwargs or {})

    def _may_defer(self) -> bool:
        return (
            torch.is_grad_enabled()
            and _top_hooks(True) == self._hooks
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
        )

    def _run(self, function: _Function, args: _Args, kwargs: _Kwargs) -> Any:  # noqa: ANN401
        """Run a function that may have a weight."""
        call = read_call(function, args, kwargs) if self._may_defer() else None
        return function(*args, **kwargs) if call is None else self._defer(call)

    def _defer(self, call: Call) -> Tensor:
        operation, x, weight, bias = call
        dtype = None
        if operation.is_cast and torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = _lowered(x, dtype), None if bias is None else _lowered(bias, dtype)
        self._leaves.update(map(id, weight.leaves))
        plan = _Plan(operation, weight, dtype, self._pending)
        made: Tensor = _DeferredOperation.apply(self._pending.anchor, x, bias, plan)  # type: ignore[no-untyped-call]
        return made

    def _look_inside(self, function: _Function, args: _Args, kwargs: _Kwargs) -> Any:  # noqa: ANN401
        """Run a Python function that passes its weights to other functions, with the mode active inside it."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not isinstance(function, FunctionType) or not all(map(is_plain, tensors)):
            return function(*args, **kwargs)
        # The function checks for an active mode, and would pass itself to this mode again: make the check return False.
        names = {**function.__globals__, **dict.fromkeys(_MODE_CHECKS, _return_false)}
        copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        copied.__kwdefaults__ = function.__kwdefaults__
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return copied(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _differentiate(self, function: _Function, args: _Args, kwargs: _Kwargs) -> Any:  # noqa: ANN401
        """Differentiate inside a forward; raise if this is with respect to a weight whose gradient is deferred."""
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if any(id(tensor) in self._leaves for tensor in asked):
            raise UsageError(
                "the forward of a stage differentiates with respect to a weight whose gradient is deferred; use a"
                " schedule that does not split the backward into I and W, such as 1f1b"
            )
        return function(*args, **kwargs)


class _Plan(NamedTuple):
    """A deferred operation without its tensors; dtype is that of autocast."""

    operation: Operation
    weight: Weight
    dtype: torch.dtype | None
    pending: Pending


class _DeferredOperation(torch.autograd.Function):
    """An operation whose backward returns the gradients of input and bias, and defers the gradient of the weight.

    The weight is not an input of the autograd function. Otherwise I would walk the weight's graph and free it before W.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # noqa: ANN401 - autograd's arguments
        """Compute the output from anchor, input, bias and plan."""
        _, x, bias, plan = given
        weight = plan.weight.tensor
        ctx.save_for_backward(x, weight.detach())  # not cast: a copy per micro-batch in flight is much memory
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.bias_shape = plan, None if bias is None else bias.shape
        if plan.dtype is not None:
            weight = _lowered(weight, plan.dtype)
            weight = weight if weight.requires_grad else weight.requires_grad_()  # torch chooses kernels by this flag
        made: Tensor = plan.operation.forward(Operands(x, weight, bias))
        # the output must not be a view, or it could not be changed in place
        return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias."""
        if gradient is None:
            return None, None, None, None
        (x, weight), plan = ctx.saved_tensors, ctx.plan
        operation, for_input, for_bias = plan.operation, None, None
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():
                weight = plan.weight.tensor  # a double backward also reaches the weight
            if plan.dtype is not None:
                weight = _lowered(weight, plan.dtype)
            for_input = operation.for_input(gradient, Operands(x, weight))
        if ctx.needs_input_grad[2]:
            for_bias = operation.for_bias(gradient, ctx.bias_shape)
        if plan.pending.is_wanted():
            plan.pending.add(plan.weight, operation, x, gradient)
        return None, for_input, for_bias, None


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor cast as by autocast, which casts neither float64 nor types other than floats."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _return_false(*_: object) -> bool:
    return False


_MODE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(SIGNATURES, DeferredWeightGradients._run),
    functional.multi_head_attention_forward: DeferredWeightGradients._look_inside,
    torch.autograd.grad: DeferredWeightGradients._differentiate,
}
if hasattr(functional, "linear_cross_entropy"):
    _HANDLERS[functional.linear_cross_entropy] = DeferredWeightGradients._look_inside
