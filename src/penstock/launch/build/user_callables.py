"""User callables: find and call user code that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import UsageError, nearest
from penstock.model.small_models.named_models import find


def find_callable(key: str, name: str) -> Callable[..., Any]:
    """Return the callable that a key names.

    Raises:
        UsageError: if it does not exist.
    """
    try:
        found: Callable[..., Any] = find(name)
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from error
    return found


def call(key: str, name: str, arguments: Mapping[str, Any], *positional: object) -> Any:  # noqa: ANN401 - what it returns
    """Call the callable that a key names; its own exceptions pass through.

    Raises:
        UsageError: if it does not exist or does not take these arguments.
    """
    function = find_callable(key, name)
    check_arguments(key, name, function, arguments, *positional)
    return function(*positional, **arguments)


def check_arguments(
    key: str, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], *positional: object
) -> None:
    """Refuse arguments that a callable does not take, or that it needs and lacks."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        names = [n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        hints = "".join(nearest(word, names) for word in arguments if word not in names)
        raise UsageError(f"{key}_args: {name} does not take these: {error}.{hints} It takes {signature}") from None
