"""Pickle reader: read a pickle as data. It imports no name and calls nothing, so no code in the pickle can run.

A pickle is a program for a small stack machine. This machine runs only the instructions that build numbers, strings and
containers. Instead of an import or a call, it records the name and the arguments.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import CheckpointError


@dataclass(frozen=True)
class Name:
    """A name in a pickle: its module and its name there."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class RecordedCall:
    """The record of a call; `state` is the state that the pickle would set on the result."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None

    @property
    def fields(self) -> Mapping[str, Any]:
        """The attributes of a dataclass instance."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickled(data: bytes, allowed: Mapping[str, Collection[str]], *, source: str) -> Any:  # noqa: ANN401
    """Return the data of a pickle, with `RecordedCall` in place of every object of a class.

    Args:
        data: the pickle.
        allowed: for each module, the names that the pickle may contain.
        source: the file name for messages.

    Raises:
        CheckpointError: for any other name, or an invalid pickle.
    """
    machine = _Machine(allowed, source)
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name == "STOP":
                return machine.stack.pop()
            machine.run(code.name, argument)
    except CheckpointError:
        raise
    except Exception as error:  # a crafted file can break the stack in any way
        raise CheckpointError(f"{source}: cannot be read: {error!s:.200}") from error
    raise CheckpointError(f"{source}: is cut short")


class _Machine:
    """The stack, its marks and the memo."""

    def __init__(self, allowed: Mapping[str, Collection[str]], source: str) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._allowed, self._source = allowed, source

    def run(self, code: str, argument: Any) -> None:  # noqa: ANN401 - as the opcode has it
        if code in _VALUES:
            self.stack.append(argument)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code]())
        elif code in _STEPS:
            _STEPS[code](self, argument)
        elif code not in _NOTHING:
            raise CheckpointError(
                f"{self._source}: refused without running it: {code} is not allowed in a description of tensors"
            )

    def name(self, module: str, name: str) -> None:
        if name not in self._allowed.get(module, ()):
            raise CheckpointError(
                f"{self._source}: refused without running it: {str(module)[:80]}.{str(name)[:80]} is not allowed in a "
                "description of tensors"
            )
        self.stack.append(Name(module, name))

    def pop_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def call(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise CheckpointError(f"{self._source}: refused without running it: it calls something that is not a name")
        self.stack.append(RecordedCall(name, args))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], RecordedCall):
            raise CheckpointError(f"{self._source}: refused without running it: it sets the state of something else")
        self.stack[-1].state = state

    def remember(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        items, self.stack[at:] = self.stack[at:], []
        return items

    def take(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def extend(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip
_NOTHING = {"PROTO", "FRAME"}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.take(1),
    "TUPLE2": lambda machine, _: machine.take(2),
    "TUPLE3": lambda machine, _: machine.take(3),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.update([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.remember(None),
    "BINPUT": lambda machine, number: machine.remember(number),
    "LONG_BINPUT": lambda machine, number: machine.remember(number),
    "BINGET": lambda machine, number: machine.stack.append(machine.memo[number]),
    "LONG_BINGET": lambda machine, number: machine.stack.append(machine.memo[number]),
    "GLOBAL": lambda machine, text: machine.name(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.pop_name(),
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
