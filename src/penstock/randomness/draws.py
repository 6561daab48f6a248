"""Draws: the random numbers of a micro-batch. They are the same in every run, and independent of other threads.

The numbers follow from a seed and from the draw name, never from the stage. So another cut, schedule or keep policy
draws the same numbers. docs/design/runtime.md gives the reasons.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.checkpoint import CheckpointFunction

from penstock.errors import UsageError
from penstock.randomness.draw_names import enter, here
from penstock.randomness.placed_draws import ORIGINAL_OF, argument_names, is_on

_WORD = 2**64 - 1
_CPU = torch.device("cpu")
_MOST_GENERATORS = 1024  # per stage; a CPU generator takes 5 KB
_aten = torch.ops.aten

Operation = torch._ops.OpOverload[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# the default generators belong to the process, so only one thread at a time may borrow one
_BORROWING = threading.Lock()


def mix(*words: int) -> int:
    """Return a seed computed from some integers: 63 bits that look unrelated to those of any other integers.

    >>> mix(0, 1, 2) == mix(0, 1, 2), mix(0, 1, 2) == mix(0, 2, 1)
    (True, False)
    """
    mixed = 0
    for word in words:  # splitmix64, one round per word
        mixed = ((mixed ^ word) + 0x9E3779B97F4A7C15) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        mixed ^= mixed >> 31
    return mixed >> 1


@lru_cache(maxsize=2**16)
def _number_of(place: str) -> int:
    """Return the number of a draw name, which is the same in every process."""
    return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")


class SeededMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which every random operation of this thread draws from the mode's own generators.

    Each draw name (`penstock.randomness.draw_names`) has one generator, which is seeded when the name is entered. CUDA
    graphs need separate generators: a captured graph keeps its generator, which has only one seed per replay. An
    operation that gets a generator from the user draws from that one. The default generators do not change.

    Attributes:
        was_drawn: whether a random operation has ever run in the mode.

    >>> seeded = SeededMode(7, "cpu")
    >>> with seeded:
    ...     first = torch.nn.functional.dropout(torch.ones(64))
    >>> seeded.reseed(7)
    >>> with seeded:
    ...     bool((first == torch.nn.functional.dropout(torch.ones(64))).all())
    True
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, device: torch.device | str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.was_drawn = False
        self._seed, self._place = seed, ""
        self._generator_of: dict[tuple[torch.device, str], torch.Generator] = {}
        self._is_seeded: set[torch.device] = set()  # for the current draw name
        self._num_drawn_at: Counter[str] = Counter()  # draws of compiled code per name, in this micro-batch
        self._has_gradients = False
        self._devices = {_with_index(torch.device(device))}

    def reseed(self, seed: int) -> None:
        """Begin another micro-batch, with its seed."""
        self._seed = seed
        self._is_seeded.clear()
        self._num_drawn_at.clear()

    def seed_all(self) -> list[torch.Generator]:
        """Seed the generators of all names that have drawn, for a replay; return those on GPUs, for a capture."""
        self._is_seeded.clear()
        self._num_drawn_at.clear()
        for (_, place), generator in self._generator_of.items():
            generator.manual_seed(self._seed_of(place))
        return [found for (device, _), found in self._generator_of.items() if device.type != "cpu"]

    def _seed_of(self, place: str) -> int:
        return mix(self._seed, _number_of(place)) if place else self._seed

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the current draw name on a device."""
        place = here.place
        if place != self._place:
            self._place = place
            self._is_seeded.clear()
        found = self._generator_of.get((device, place))
        if found is None:
            device = _with_index(device)
            found = self._generator_of.get((device, place))
        if found is None:
            self._devices.add(device)
            if len(self._generator_of) >= _MOST_GENERATORS:
                # all other names share one generator, which no CUDA graph can capture: it would need two seeds
                place = _OTHERS
            found = self._generator_of.get((device, place))
            if found is None:
                found = self._generator_of[device, place] = torch.Generator(device)
        if device not in self._is_seeded:
            self._is_seeded.add(device)
            found.manual_seed(self._seed_of(self._place))
        return found

    def draws_on_other_device(self, device: torch.device) -> bool:
        """Return whether random numbers were drawn on any device other than this one."""
        return any(found != _with_index(device) for found in self._devices)

    # TorchDispatchMode's own methods also set flags of the process; these become wrong if several threads use modes
    def __enter__(self) -> SeededMode:
        self._has_gradients = torch.is_grad_enabled()
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Activate the mode inside its rules, where torch turns it off; for operations that call other operations."""
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: stages are compiled as if the mode were off; compiled code draws its seeds through the mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing here would be compiled; torch's guard against it imports the compiler and costs 1 µs per operation
        return False

    def __torch_dispatch__(self, func: Operation, _: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Run an operation; a random one by its rule."""
        rule = _rule_of(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, kwargs or {})

    @contextmanager
    def placed(self, place: int, turn: int) -> Iterator[None]:
        """Draw for one part of a compiled program, independent of the order in which torch runs its operations.

        Args:
            place: the number of the part.
            turn: the number of random operations of the part that come before this one in the graph.
        """
        places, before = here.places, here.place
        name = f"{places[place]} {turn}" if turn else places[place]
        nth = self._num_drawn_at[name]  # code that torch compiles in pieces may run a piece again
        self._num_drawn_at[name] += 1
        enter(f"{name} again {nth}" if nth else name)
        try:
            yield
        finally:
            here.place, here.places = before, places

    def draw_on(self, device: torch.device) -> torch.Generator:
        """Return the generator to draw from now.

        Raises:
            UsageError: in torch.utils.checkpoint, which would draw other numbers when it runs again in the backward;
                or in uncompiled code of a compiled program, because its part of the model is unknown.
        """
        if len(here.places) > 1:
            raise UsageError(_NOT_COMPILED)
        hooks = _top_saved_tensors_default_hooks(True)
        if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook"):
            raise UsageError(_CHECKPOINTED)
        if self._has_gradients and not torch.is_grad_enabled() and _is_called_by(CheckpointFunction.forward):
            raise UsageError(_CHECKPOINTED)
        self.was_drawn = True
        return self.generator(device)


_OTHERS = "\0 others"

_NOT_COMPILED = (
    "compile: the model draws random numbers in code that torch.compile does not compile (a graph break), so the"
    " numbers would depend on the cuts. TORCH_LOGS=graph_breaks shows the place; leave out compile=, or move the random"
    " operations to code that compiles"
)

_CHECKPOINTED = (
    "the model draws random numbers (for example dropout) inside torch.utils.checkpoint. Its second run in the backward"
    " would draw other numbers, and the gradients would be wrong. Turn checkpointing off in the model (transformers:"
    ' gradient_checkpointing_disable()), and let the pipeline recompute whole stages: keep="recompute"'
)

Rule = Callable[[SeededMode, Operation, Args, Kwargs], object]


@cache
def _rule_of(func: object) -> Rule | None:
    """Return the rule for an operation; None if it draws nothing."""
    if not isinstance(func, torch._ops.OpOverload):
        return _run_inside
    if func in ORIGINAL_OF:
        return _at_place
    if func._schema.name.endswith("_backward"):  # it gets the numbers that the forward drew
        return None
    if "generator" not in argument_names(func) and torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return _RULES[func] if func in _RULES else _rule_by_form(func)


def _rule_by_form(func: Operation) -> Rule:
    """Return the rule for a random operation that is not in `_RULES`."""
    if "generator" in argument_names(func):
        return _give_generator
    if _overload_with_generator(func) is not None:
        return _call_overload
    # composite operations arrive here whole only in inference mode
    return _decompose if func._can_decompose() else _borrow_default


def _at_place(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run a placed draw of compiled code."""
    place, turn, *given = args
    original = ORIGINAL_OF[func]
    rule = _rule_of(original)
    assert rule is not None
    with mode.placed(place, turn):
        return rule(mode, original, tuple(given), kwargs)


def _give_generator(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run an operation that takes a generator."""
    place = argument_names(func).index("generator")
    given = args[place] if place < len(args) else kwargs.get("generator")
    device = _device_of(args, kwargs)
    if given is not None or device.type == "meta" or not is_on(func, args, kwargs):
        return func(*args, **kwargs)
    generator = mode.draw_on(device)
    if place < len(args):
        return func(*args[:place], generator, *args[place + 1 :], **kwargs)
    return func(*args, **{**kwargs, "generator": generator})


def _call_overload(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run an operation by its overload that takes a generator."""
    device = _device_of(args, kwargs)
    if device.type == "meta":
        return func(*args, **kwargs)
    other = _overload_with_generator(func)
    assert other is not None
    return other(*args, **kwargs, generator=mode.draw_on(device))


def _native_dropout(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run a dropout that takes no generator: return the same result, and the mask that its backward takes."""
    value, p = args[0], args[1]
    if value.is_meta or not is_on(func, args, kwargs):
        return func(*args, **kwargs)
    generator = mode.draw_on(value.device)
    if value.is_cuda and p < 1:
        dropped, mask = _aten._fused_dropout(value, 1 - p, generator)
        return dropped, mask.view(torch.bool)
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return value.mul(mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask


def _cudnn_rnn(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run a recurrent network of cuDNN with its own dropout state.

    By default, all networks of the process share one state in device memory.
    """
    if not is_on(func, args, kwargs):
        return func(*args, **kwargs)
    # the seed is drawn on the host, which would otherwise have to wait for the device
    seed = torch.randint(2**62, (), generator=mode.draw_on(_CPU)).item()
    given = dict(zip(argument_names(func), args, strict=False)) | kwargs
    device = given["input"].device
    state = _aten._cudnn_init_dropout_state(given["dropout"], True, seed, dtype=torch.uint8, device=device)
    return func(**{**given, "dropout_state": state})


def _borrow_default(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run an operation that takes no generator: temporarily put the mode's state into the default generator."""
    device = _device_of(args, kwargs)
    if device.type == "meta" or not is_on(func, args, kwargs):
        return func(*args, **kwargs)
    own = mode.draw_on(device)
    if device.type == "cpu":
        with _BORROWING:
            default = torch.default_generator
            before = default.get_state()
            default.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(default.get_state())
                default.set_state(before)
    with _BORROWING:
        default = torch.get_device_module(device).default_generators[own.device.index]
        # these functions exchange the states without a copy, and CUDA graphs can capture them
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(own)
        try:
            return func(*args, **kwargs)
        finally:
            default.graphsafe_set_state(before)


def _decompose(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run an operation as the smaller operations that it consists of."""
    with mode.again():
        # not func.decompose(): it has other code for some operations, and that of lstm omits the dropout
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _run_inside(mode: SeededMode, func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run an operation that calls functions, such as torch.cond; these functions draw under the mode too."""

    def wrapped(value: Any) -> Any:  # noqa: ANN401
        if not callable(value) or isinstance(value, (torch.Tensor, type)):
            return value

        def inside(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with mode.again():
                return value(*args, **kwargs)

        return inside

    return func(*map(wrapped, args), **{key: wrapped(value) for key, value in kwargs.items()})


_RULES: dict[Operation, Rule] = {_aten.native_dropout.default: _native_dropout, _aten._cudnn_rnn.default: _cudnn_rnn}


@cache
def _overload_with_generator(func: Operation) -> Operation | None:
    """Return the overload that takes the same arguments and a generator; None if there is none."""

    def signature(operation: Operation) -> list[tuple[str, str]]:
        arguments = operation._schema.arguments
        return [(argument.name, str(argument.type)) for argument in arguments if argument.name != "generator"]

    packet = func.overloadpacket
    others: list[Operation] = [getattr(packet, overload) for overload in packet.overloads()]
    fitting = (
        other for other in others if "generator" in argument_names(other) and signature(other) == signature(func)
    )
    return next(fitting, None)


def _device_of(args: Args, kwargs: Kwargs) -> torch.device:
    """Return the device on which an operation runs."""
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked)
    return next((value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), _CPU)


def _with_index(device: torch.device) -> torch.device:
    """Return a device with its index; "cuda" means the current GPU."""
    if device.type == "cpu":
        return _CPU
    if device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _is_called_by(function: Callable[..., Any]) -> bool:
    """Return whether a function is on the call stack of this thread."""
    frame = sys._getframe(1)
    code = function.__code__
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
