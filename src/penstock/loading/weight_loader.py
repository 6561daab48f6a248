"""Weight loader: fill the tensors of this process from files; tensors in no file are initialised by the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from os import PathLike
from typing import Any, TypeVar, cast

import torch
from torch import nn

from penstock.errors import CheckpointError, PenstockError, UsageError, error_in_short, warn_user
from penstock.loading.initialisation import initialise
from penstock.loading.weight_files import WeightFiles, open_weights
from penstock.loading.weight_recipes import Recipe, is_of_transformers, recipes_of
from penstock.model.parameters import held_tensors, read_parameters, replaced_tensors, tensor_places, unsaved_names
from penstock.model.preserve import emptied
from penstock.tensor_files.safetensors_reader import SafetensorsReader

Progress = Callable[[str, int, int], None]
_R = TypeVar("_R")
_SHOWN = 5  # names in a message


class ModelOnMeta:
    """A model with parameters on meta. Its other tensors are on meta too while it is captured, and keep their values.

    torch's device("meta") puts all tensors on meta. `penstock.empty_weights` and similar tools put only parameters
    there, so that buffers keep their values. An adapter that was added later has values too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if is_of_transformers(model):
            cast("Any", model).tie_weights()  # tools that replace parameters separate the tied ones
        self._places = tensor_places(model)
        self._tensors = {name: _first(places) for name, places in self._places.items()}
        self.given = {name: tensor for name, tensor in self._tensors.items() if not tensor.is_meta}

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Put all tensors on meta temporarily; afterwards the model has its own tensors, also those on meta.

        A buffer of a lane must not stay in the model: the next pipeline would take its memory for values of the model.
        """
        inside = {name: emptied(tensor) if name in self.given else tensor for name, tensor in self._tensors.items()}
        with replaced_tensors(self._places, inside):
            yield

    def fill(self, own: Mapping[str, Sequence[torch.Tensor]]) -> set[str]:
        """Fill what no state dict holds: values that the model had, and non-persistent buffers; return their names."""
        parameters, _ = read_parameters(self._model)
        unsaved = unsaved_names(self._model)
        lacking = [
            name
            for name, parameter in parameters.items()
            if {name, *parameter.aliases} <= unsaved and name not in self.given
        ]
        give_values(self._model, self.given, own, [])
        filled = {name for name in own if name in self.given}
        with suppress(UsageError):  # then a state dict must have them
            give_values(self._model, {}, own, lacking)
            filled |= set(lacking) & own.keys()
        return filled


def _first(places: Sequence[tuple[dict[str, Any], str]]) -> torch.Tensor:
    kind, key = places[0]
    found: torch.Tensor = kind[key]
    return found


class WeightLoader:
    """Fills tensors of a model: from files, with the values that they had, or by the model's own initialisation.

    What the files lack or hold in another shape is known before any memory is filled.

    Raises:
        CheckpointError: if the files are damaged or do not fit the model.
        UsageError: if they hold another kind of model.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | PathLike[str],
        *,
        given: Mapping[str, torch.Tensor],
        progress: Progress | None = None,
    ) -> None:
        self._model, self._given, self._progress = model, given, progress
        self._files: WeightFiles = open_weights(path)
        try:
            self._parameters, self._first_of = read_parameters(model)
            found = recipes_of(model, self._files)
            self._recipe_of = self._choose(found.of)
            self._check_fit(found.unused)
        except BaseException:
            self._files.close()
            raise

    def _choose(self, recipes: Mapping[str, Recipe]) -> dict[str, tuple[tuple[str, Recipe], ...]]:
        """Return the recipes of each tensor, by its first name, with the name that each recipe makes."""
        chosen: dict[str, tuple[tuple[str, Recipe], ...]] = {}
        for name, recipe in recipes.items():
            first = self._first_of.get(name)
            if first is not None:
                chosen[first] = (*chosen.get(first, ()), (name, recipe))
        return chosen

    def _check_fit(self, unused: Sequence[str]) -> None:
        tensors = {name: _first(places) for name, places in tensor_places(self._model).items()}
        if not self._recipe_of:
            here, there = (", ".join(list(names)[:_SHOWN]) for names in (tensors, self._files.shapes))
            raise CheckpointError(
                f"{self._files.path}: holds no tensor of the model; its tensors: {there}; the model's: {here}"
            )
        wrong = [
            f"{name}: {self._files.shapes[recipe.keys[0]]} instead of {tuple(tensors[first].shape)}"
            for first, found in self._recipe_of.items()
            for name, recipe in found
            if recipe.convert is None and self._files.shapes[recipe.keys[0]] != tuple(tensors[first].shape)
        ]
        if wrong:
            raise CheckpointError(f"{self._files.path}: tensors of another shape than in the model: {_some(wrong)}")
        unsaved = unsaved_names(self._model)
        self.lacking = [name for name in tensors if name not in self._recipe_of]
        saved = [name for name in self.lacking if not {name, *self._parameters[name].aliases} <= unsaved]
        self._warn(saved, unused)

    def _warn(self, lacking: Sequence[str], unused: Sequence[str]) -> None:
        ignored = self._ignored()
        new = [name for name in lacking if name not in self._given]
        kept = [name for name in lacking if name in self._given]
        unused = [name for name in unused if not ignored(name)]
        if new:
            warn_user(f"{self._files.path}: holds no values for {_some(new)}; the model initialises them")
        if kept:
            warn_user(f"{self._files.path}: holds no values for {_some(kept)}; they keep the values that they have")
        if unused:
            warn_user(f"{self._files.path}: the model does not have {_some(unused)}; they are not loaded")

    def _ignored(self) -> Callable[[str], bool]:
        patterns = list(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ())
        if is_of_transformers(self._model):  # older files hold buffers that are computed now
            patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        return lambda name: any(re.search(pattern, name) for pattern in patterns)

    def fill(self, own: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Fill the tensors of this process: for each first name, its copies on all devices.

        Raises:
            CheckpointError: if something cannot be read, or tied tensors have different values.
            UsageError: if a tensor is in no file, and nothing initialises it.
        """
        try:
            with torch.no_grad():
                self._read(own)
                given = {name: tensor for name, tensor in self._given.items() if name in self.lacking}
                give_values(self._model, given, own, [name for name in self.lacking if name not in given])
        finally:
            self.close()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._files.close()

    def __enter__(self) -> WeightLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, own: Mapping[str, Sequence[torch.Tensor]]) -> None:
        wanted = {id(recipe): recipe for name in own for _, recipe in self._recipe_of.get(name, ())}
        ordered = sorted(wanted.values(), key=self._position)
        done, total = 0, sum(map(self._num_bytes, ordered))
        filled: set[str] = set()
        for recipe in ordered:
            for name, values in self._made(recipe, own, filled):
                first = self._first_of[name]
                if first in filled:
                    self._check_tied(first, name, own[first][0], values)
                elif values is not own[first][0]:
                    _copy_all(values, own[first], name)
                else:
                    _copy_all(values, own[first][1:], name)
                filled.add(first)
            done += self._num_bytes(recipe)
            if self._progress is not None:
                self._progress("read weights (MiB)", done >> 20, max(1, total >> 20))

    def _made(
        self, recipe: Recipe, own: Mapping[str, Sequence[torch.Tensor]], filled: set[str]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of a recipe that this process holds, by name."""
        mine = [name for name in recipe.targets if self._first_of.get(name) in own]
        if recipe.convert is None:
            (name,) = mine
            first = self._first_of[name]
            target = own[first][0] if first not in filled else torch.empty_like(own[first][0])
            self._files.read_into(recipe.keys[0], target)
            return [(name, target)]
        made = recipe.convert(self._read_one)
        absent = [name for name in mine if name not in made]
        if absent:
            raise CheckpointError(f"{self._files.path}: {_some(recipe.keys)} do not make {_some(absent)}")
        return [(name, made[name]) for name in mine]

    def _read_one(self, key: str) -> torch.Tensor:
        reader = self._files.readers[key]
        return reader.read(key)

    def _position(self, recipe: Recipe) -> tuple[str, int]:
        """Return a key that orders recipes as their tensors lie on the disk."""
        reader = self._files.readers[recipe.keys[0]]
        begin = reader.tensors[recipe.keys[0]].begin if isinstance(reader, SafetensorsReader) else 0
        return str(reader.path), begin

    def _num_bytes(self, recipe: Recipe) -> int:
        return sum(self._files.readers[key].tensors[key].num_bytes for key in recipe.keys)

    def _check_tied(self, first: str, name: str, filled: torch.Tensor, values: torch.Tensor) -> None:
        if not torch.equal(filled, values.to(filled.device, filled.dtype)):
            raise CheckpointError(
                f"{self._files.path}: the model ties {first} and {name}, but the files hold different values for them; "
                "untie them in the model (tie_word_embeddings=False in the config)"
            )


@torch.no_grad()
def give_values(
    model: nn.Module,
    given: Mapping[str, torch.Tensor],
    own: Mapping[str, Sequence[torch.Tensor]],
    lacking: Sequence[str],
) -> None:
    """Fill tensors with the values that the model had, and others by the model's own initialisation.

    Raises:
        UsageError: if nothing initialises one of them.
    """
    for name in given.keys() & own.keys():
        _copy_all(given[name], own[name], name)
    on_host = {
        name: own[name][0] if own[name][0].device.type == "cpu" else torch.empty_like(own[name][0], device="cpu")
        for name in lacking
        if name in own
    }
    initialise(model, lacking, on_host)
    for name, values in on_host.items():
        _copy_all(values, [tensor for tensor in own[name] if tensor is not values], name)


def _copy_all(values: torch.Tensor, targets: Sequence[torch.Tensor], name: str) -> None:
    for target in targets:
        if values.shape != target.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(values.shape)} in the files, and {tuple(target.shape)} in the model"
            )
        target.detach().copy_(values)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def model_on_meta(model: nn.Module | Sequence[nn.Module]) -> ModelOnMeta | None:
    """Return what to do with a model that has parameters on meta; None if it has none."""
    if not isinstance(model, nn.Module) or not any(parameter.is_meta for parameter in model.parameters()):
        return None
    return ModelOnMeta(model)


def load_part(
    model: nn.Module,
    path: str | PathLike[str],
    wanted: Callable[[str], bool],
    *,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """Give values to a part of a model on meta, in the model itself; the rest stays on meta.

    Args:
        model: the model.
        path: the file or folder of its weights.
        wanted: returns whether a tensor belongs to the part, from one of its names.
        device: where to put the part.
        progress: called with the current activity, the units done, and their total.

    Raises:
        CheckpointError: if the files are damaged or do not fit the model.
        UsageError: if they hold another kind of model, if the model has its weights already, or if nothing initialises
            a tensor that is in no file.
    """
    on_meta = model_on_meta(model)
    if on_meta is None:
        raise UsageError("weights: the model already has its weights: build it on meta, or leave weights= out")
    parameters, _ = read_parameters(model)
    places = tensor_places(model)
    own = {
        name: [_filled_later(_first(found), device)]
        for name, found in places.items()
        if _first(found).is_meta and any(map(wanted, (name, *parameters[name].aliases)))
    }
    WeightLoader(model, path, given=on_meta.given, progress=progress).fill(own)
    for name, (tensor,) in own.items():
        for kind, key in places[name]:
            kind[key] = tensor


def _filled_later(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor, device=device)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def in_all_processes(
    gather: Callable[[Any], list[Any]],
    work: Callable[[], _R],
    error_of: Callable[[str], PenstockError] = lambda fault: CheckpointError(
        f"another process could not load its weights: {fault}"
    ),
) -> _R:
    """Do something in all processes; raise in all of them if it fails in one, so that none waits for the others.

    Args:
        gather: returns the JSON values of all processes; they all must make the same calls.
        work: what to do; it does not communicate.
        error_of: returns the error of the processes that did not fail, from the message of one that did.
    """
    made: list[_R] = []
    error: Exception | None = None
    try:
        made.append(work())
    except Exception as raised:
        error = raised
    told = "" if error is None else str(error) if isinstance(error, PenstockError) else error_in_short(error)
    faults = [fault for fault in gather(told) if fault]
    if error is not None:
        raise error
    if faults:
        raise error_of(faults[0])
    return made[0]


def open_loader(
    model: nn.Module | Sequence[nn.Module],
    path: str | PathLike[str] | None,
    on_meta: ModelOnMeta | None,
    progress: Progress | None,
    gather: Callable[[Any], list[Any]],
) -> AbstractContextManager[WeightLoader | None]:
    """Open the files of a model's weights, in all processes or in none; they are closed after the block.

    Without a path, there is no loader. Tensors that the files lack keep the values that they have.

    Raises:
        CheckpointError: if the files are damaged or do not fit the model, here or in another process.
        UsageError: if they hold another kind of model, if there are several stage modules, or if only some processes
            were given weights.
    """
    opened: list[WeightLoader] = []

    def start() -> None:
        if path is None:
            return
        if not isinstance(model, nn.Module):
            raise UsageError("weights: needs a single model, not a list of stage modules")
        given = held_tensors(model) if on_meta is None else on_meta.given
        opened.append(WeightLoader(model, path, given=given, progress=progress))

    try:
        in_all_processes(gather, start)
        has_path = gather(path is not None)
        if len(set(has_path)) > 1:
            lane = has_path.index(False)
            raise UsageError(f"weights: given in some processes, but not in that of lane {lane}; pass it in all")
    except BaseException:
        for loader in opened:
            loader.close()
        raise
    return opened[0] if opened else nullcontext()
