"""Data source: the batches that a configuration names, and the first of them, which must fit the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import CaptureError, PenstockError, UsageError, error_in_short
from penstock.launch.build.named_parts import call, check_arguments
from penstock.launch.build.small_gpt import load_text
from penstock.model.example import arguments_of
from penstock.model.source import line_of

if TYPE_CHECKING:
    from penstock.launch.config.config import Config

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MOST = 6  # maximum number of parts of a batch to show


class Text:
    """Batches of random pieces of the text of Penstock; each epoch always has the same batches.

    Args:
        batch_size: pieces per batch.
        length: characters per piece.
        batches: batches per epoch.
        seed: seed of the positions; each epoch draws its own positions.
        labels: whether to yield dicts of input_ids and labels, for models of transformers.
        is_held_out: whether to use the last tenth of the text, which is reserved for validation.
    """

    def __init__(
        self, *, batch_size: int = 32, length: int = 32, batches: int = 100, seed: int = 0, labels: bool = False,
        is_held_out: bool = False,
    ) -> None:  # fmt: skip
        for name, number in {"batch_size": batch_size, "length": length, "batches": batches}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"data_args: {name} must be a whole number, 1 or more; given: {number!r}")
        self._size, self._length, self._batches = batch_size, length, batches
        self._seed, self._labels, self._is_held_out = seed, labels, is_held_out
        self._epoch, self._given = 0, 0

    def __len__(self) -> int:
        return self._batches

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position."""
        self._epoch, self._given = state["epoch"], state["given"]

    def __iter__(self) -> Iterator[Any]:
        numbers = load_text().numbers
        border = len(numbers) * 9 // 10
        part = numbers[border:] if self._is_held_out else numbers[:border]
        if self._length >= len(part):
            raise UsageError(f"data_args: length must be below that of the text, {len(part)}; given: {self._length}")
        while self._given < self._batches:
            # each batch has its own seed, so the batches are the same after a resume at any position
            drawn = torch.Generator().manual_seed((self._seed << 40) + (self._epoch << 20) + self._given)
            starts = torch.randint(len(part) - self._length, (self._size, 1), generator=drawn)
            pieces = part[starts + torch.arange(self._length + 1)]
            self._given += 1
            inputs = pieces[:, :-1].contiguous()
            yield {"input_ids": inputs, "labels": inputs} if self._labels else (inputs, pieces[:, 1:].contiguous())
        if not self._is_held_out:
            self._epoch += 1
        self._given = 0


class Batches:
    """Batches of other data, with a function applied to each; it exposes the state and the samplers of the data."""

    def __init__(self, data: Iterable[Any], change: Callable[[Any], Any]) -> None:
        self._data, self._change = data, change
        for name in ("state_dict", "load_state_dict"):
            if callable(getattr(data, name, None)):
                setattr(self, name, getattr(data, name))
        for name in ("sampler", "batch_sampler"):  # these may need the number of the epoch
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))

    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._data)


def build_data(config: Config) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """Return the batches for training, and those for validation or None."""
    train, validation = _made("data", config.data, config.data_args)
    if config.validation is not None:
        if validation is not None:
            raise UsageError(f"validation: {config.data} already returns validation batches; leave this key out")
        validation, more = _made("validation", config.validation, config.data_args)
        validation = validation if config.validation != "penstock:text" else more
    if validation is None and config.validate_every:
        raise UsageError("validate_every: there are no validation batches: set validation, or return them from data")
    if config.precision == "fp64":
        train = Batches(train, _doubled)
        validation = None if validation is None else Batches(validation, _doubled)
    return train, validation


def _made(key: str, name: str, arguments: Mapping[str, Any]) -> tuple[Iterable[Any], Iterable[Any] | None]:
    if name == "penstock:text":
        check_arguments("data", "penstock:text", Text, arguments)
        few = dict(arguments) | {"batches": min(4, arguments.get("batches", 4)), "is_held_out": True}
        return Text(**arguments), Text(**few)
    made = call(key, name, arguments)
    parts = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for number, part in enumerate(parts):
        is_left_out = part is None and number == 1  # no validation
        if not is_left_out and (isinstance(part, (str, Mapping)) or not _can_iterate(part)):
            what = type(part).__name__ if made is part else f"({', '.join(type(one).__name__ for one in parts)})"
            hint = " (is a return missing?)" if made is None else ""
            raise UsageError(
                f"{key}: {name} returned {what}{hint}; it must return batches, such as a DataLoader, or a pair of"
                " training and validation batches"
            )
    return parts


def _can_iterate(thing: object) -> bool:
    return hasattr(thing, "__iter__") or hasattr(thing, "__getitem__")


def _doubled(item: Any) -> Any:  # noqa: ANN401 - an item of the data
    """Return an item with its floating-point tensors in double precision."""
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
    if isinstance(item, Mapping):
        return {name: _doubled(value) for name, value in item.items()}
    if isinstance(item, (tuple, list)):
        return type(item)(_doubled(value) for value in item) if type(item) in (tuple, list) else item
    return item


def first_item(data: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Return the first item, and data that still includes it; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        state = data.state_dict() if isinstance(data, Text) else None
        batches = iter(data)
        try:
            item = next(batches)
        except StopIteration:
            raise UsageError("data: has no batches") from None
    if isinstance(data, Text) and state is not None:
        data.load_state_dict(state)
    if batches is data:  # an iterator, which runs only once
        return item, chain([item], batches)
    return item, data


def count_tokens_of(example: Any) -> Callable[[Any], int] | None:  # noqa: ANN401 - a batch
    """Return a function that counts the tokens of an item; None if batches are not rows of integers."""

    def tokens(batch: Any) -> torch.Tensor | None:  # noqa: ANN401 - a batch
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
        return next((part for part in parts if isinstance(part, torch.Tensor)), None)

    first = tokens(example)
    if first is None or first.dim() < 2 or first.is_floating_point():
        return None

    def count(item: Any) -> int:  # noqa: ANN401 - (batch, target), or a batch alone
        found = tokens(item[0] if isinstance(item, (tuple, list)) and item else item)
        return 0 if found is None else found.numel()

    return count


# ---- messages in terms of the data


def check_pair(config: Config, item: Any) -> None:  # noqa: ANN401 - an item of the data
    """Refuse an item that is not (batch, target) with a UsageError, if the loss takes a target."""
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        raise UsageError(
            f"data: {config.data} yields {_kind(item)}, but loss = {config.loss!r} takes a target: yield (batch, "
            f"target), or a batch alone with loss = 'model' if the model returns its loss; the first item: "
            f"{show_batch(item)}"
        )


@contextmanager
def explain_bad_batches(config: Config, model: Any, example: Any) -> Iterator[None]:  # noqa: ANN401 - as users give them
    """If capturing or measuring fails inside, call the plain model; raise a UsageError if this fails too."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CaptureError) or not isinstance(error, PenstockError):
            _call(config, model, example)
        raise


def _call(config: Config, model: Any, example: Any) -> None:  # noqa: ANN401 - as users give them
    is_half = AUTOCAST.get(config.precision)
    try:
        args, kwargs = arguments_of(example)
        with torch.no_grad(), nullcontext() if is_half is None else torch.autocast("cpu", dtype=is_half):
            for module in model if isinstance(model, list) else [model]:
                made = module(*args, **kwargs)
                args, kwargs = made if isinstance(made, tuple) else (made,), {}
    except Exception as error:
        where = line_of(error)
        raise UsageError(
            f"the model raises an error on the first batch of data ({show_batch(example)}): {error_in_short(error)}"
            f"{where and ' '}{where}; this also happens without a pipeline. Check the batches of {config.data} and the"
            " model"
        ) from None


def show_batch(batch: Any) -> str:  # noqa: ANN401 - whatever the data yields
    """Return the types and shapes of a batch, without values.

    >>> show_batch((torch.zeros(2, 3), {"y": torch.zeros(2, dtype=torch.int64)}))
    '(float32 [2, 3], {y: int64 [2]})'
    """
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {show_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        few = [show_batch(part) for part in batch[:_MOST]] + (["…"] if len(batch) > _MOST else [])
        return ("({})" if isinstance(batch, tuple) else "[{}]").format(", ".join(few))
    return type(batch).__name__


def _kind(item: Any) -> str:  # noqa: ANN401 - an item of the data
    if isinstance(item, (tuple, list)):
        return f"{type(item).__name__}s of {len(item)}"
    return f"items of type {type(item).__name__}"
