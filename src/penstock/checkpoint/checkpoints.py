"""Checkpoints: save the state of a training beside its steps, and take it up again."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from penstock.checkpoint.content import PARTS, Content, Snapshot
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.host_copies import Staging
from penstock.checkpoint.leftovers import sweep
from penstock.checkpoint.manifest import Manifest, folder_name, read_manifest
from penstock.checkpoint.misfit import MisfitError
from penstock.checkpoint.optimizer_states import lost_members
from penstock.checkpoint.reader import Loaded, Restored, complete, faults_of, found, load
from penstock.checkpoint.save_job import Job, Saving
from penstock.checkpoint.state_as_json import from_plain
from penstock.errors import CheckpointError, HangError, LostError, UsageError
from penstock.pipeline.pipeline import Pipeline

__all__ = ["Checkpoints"]

_NO_NOTES: Mapping[str, Any] = MappingProxyType({})
_MAX_STEP = 10**18
_LEAVE_SECONDS, _LOST_SECONDS = 10.0, 1.0  # without a byte of another process, when a training has ended


class Checkpoints:
    """The checkpoints of a training in a folder.

    `save` copies everything to host memory and returns; the disk is written to meanwhile. A checkpoint has its name
    only when it is complete and on the disk, and is never written to again. What a lane holds is stored under the
    model's own names, so that any number of lanes, threads or processes, can take it up, with another schedule too.

    Under torchrun every process makes one, with the same arguments, and calls the same methods; the folder must be one
    that all of them see.

    >>> from tempfile import TemporaryDirectory
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> batch, target = torch.ones(6, 4), torch.zeros(6, 1)
    >>> with (
    ...     TemporaryDirectory() as folder,
    ...     Pipeline(model, example=batch, loss=torch.nn.MSELoss(), lanes=2, micro_batches=3, cuts=[2]) as pipe,
    ...     Checkpoints(folder, pipe, optimizer=torch.optim.AdamW(pipe.parameters())) as checkpoints,
    ... ):
    ...     _ = pipe.step(batch, target)
    ...     checkpoints.save(1, notes={"epoch": 0}, wait=True)
    ...     restored = checkpoints.restore()
    >>> restored.step, restored.notes["epoch"]
    (1, 0)

    Args:
        folder: where they are; made when the first is saved.
        pipe: the pipeline.
        optimizer: of its parameters, or several, as `pipe.optimizers.values()`.
        scheduler: of the learning rate, or several.
        scaler: the GradScaler that the pipeline was given.
        data: anything with `state_dict()` and `load_state_dict()` that knows its place in the data, as a feed.
        keep: so many of the newest stay; older ones are deleted when a newer one is complete.

    Attributes:
        failures: what went wrong with saves; each was warned about, and the training went on.
        patience_seconds: that the first process waits for the others' parts while none of them writes anything.
        on_saved: is told the step and folder of what became complete, at the next `save`, `wait` or `poll`.
        fence: is asked, in the first process, before a save begins and before it becomes complete, why this training
            may not write here any more; an answer is an error, and nothing is saved.

    Raises:
        UsageError: for arguments that cannot be right.
    """

    def __init__(
        self,
        folder: str | Path,
        pipe: Pipeline,
        *,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scheduler: Any | Iterable[Any] | None = None,  # noqa: ANN401 - torch's have no common type
        scaler: torch.amp.GradScaler | None = None,
        data: Any = None,  # noqa: ANN401 - anything with a state
        keep: int = 3,
    ) -> None:
        if not isinstance(pipe, Pipeline):
            raise UsageError(f"pipe: give a penstock.Pipeline; given: {type(pipe).__name__}")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise UsageError(f"keep: at least 1 checkpoint must stay; given: {keep!r}")
        self.folder = Path(folder).absolute()  # the training may change to another folder
        self._keep, self._group = keep, pipe.internals.group
        self._process = pipe.lanes[0] if len(pipe.lanes) < pipe.schedule.num_lanes else 0
        self._num_processes = pipe.schedule.num_lanes // len(pipe.lanes)
        self._content = Content(pipe, _several(optimizer), _several(scheduler), scaler, data)
        self.failures: list[str] = []
        self.on_saved: Callable[[int, Path], None] | None = None
        self.fence: Callable[[], str] = str  # says nothing
        self.patience_seconds = 120.0
        self._disk, self._staging = Disk(), Staging(len(pipe.lanes))
        self._saving: Saving | None = None
        self._own: set[int] = set()  # the steps that were saved or taken up here
        self._restored_step: int | None = None
        self._damaged: set[str] = set()  # the folders that were passed over
        self._num_saves, self._is_swept = 0, False
        is_file = self.folder.exists() and not self.folder.is_dir()
        fault = f"folder: {self.folder} is not a folder" if is_file and self._process == 0 else ""
        fault, self._nonce = self._group.gather([fault, secrets.token_hex(4)])[0]
        if fault:
            raise UsageError(fault)

    def save(self, step: int, *, notes: Mapping[str, Any] = _NO_NOTES, wait: bool = False) -> None:
        """Save everything as it is now; return when it is copied to host memory.

        One save is under way at a time: the next one waits until it is on the disk. A step that has a good checkpoint
        is not saved again. What cannot be written is warned about and noted in `failures`; the training goes on.

        Args:
            step: how many steps were made.
            notes: the caller's own, as JSON can hold them; `restore` gives them back.
            wait: until it is complete.

        Raises:
            UsageError: for a step or a state that cannot be saved.
        """
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEP:
            raise UsageError(f"step: give a whole number from 0; given: {step!r}")
        self._settle()
        snapshot = self._collect(step, notes)
        if snapshot is None:
            if step not in self._own:
                where = self.folder / folder_name(step)
                self._warn(
                    f"{where} is there already, and was not made or taken up by this training: nothing was saved. "
                    "Choose another folder, or restore() first"
                )
            return
        files, waits = self._staging.copy(snapshot.files)
        self._num_saves += 1
        job = Job(
            self.folder, f"{self._nonce}{self._num_saves:x}", step, self._process, self._num_processes, files,
            snapshot.part, snapshot.state, self._content.plan, self._content.aliases, self._keep, waits,
            self.patience_seconds, frozenset(self._damaged), self.fence,
        )  # fmt: skip
        self._saving = Saving(job, self._disk)
        if wait:
            self.wait()

    def check(self) -> None:
        """See whether everything as it is now could be saved; nothing is written.

        Raises:
            UsageError: for a state that cannot be saved, in all processes.
        """
        self._collect(0, _NO_NOTES, is_dry=True)

    def wait(self) -> None:
        """Wait until what is under way is complete, or has failed."""
        self._settle()

    def poll(self) -> None:
        """Tell `on_saved` of what has become complete, without a wait; only the first process knows of it so early."""
        if self._saving is not None and self._saving.is_complete:
            self._saved(self._saving)

    def restore(self, source: str | Path | int = "newest", *, parts: Iterable[str] = PARTS) -> Restored | None:
        """Take up a checkpoint: the newest that is good, or a certain one.

        Everything is read and checked before anything is changed, and all processes take up the same one.

        Args:
            source: "newest", a step, the folder of a checkpoint, or a folder of checkpoints, of which the newest is
                taken.
            parts: what of it to take up, of "model", "optimizer", "scheduler", "scaler", "data" and "random"; by
                default all that was saved.

        Returns:
            What was taken up; None where there is none.

        Raises:
            CheckpointError: when there are checkpoints and none is good; when it is of another model; when the one
                that was asked for is not there or damaged.
            UsageError: for parts that there are not.
        """
        wanted = frozenset([parts] if isinstance(parts, str) else parts)
        if not wanted or wanted - set(PARTS):
            raise UsageError(f"parts: give some of {', '.join(PARTS)}; given: {', '.join(map(str, wanted)) or 'none'}")
        self._settle()
        folders = self._candidates(source)
        if not folders:
            return None
        passed_over: list[str] = []
        for folder in folders:
            loaded, fault, is_misfit = self._try_to_load(Path(folder), wanted)
            told = self._group.gather([fault, is_misfit, self._content.optimizers.members()])
            faults = list(dict.fromkeys(text for text, _, _ in told if text))
            if any(misfit for _, misfit, _ in told):
                raise MisfitError(next(text for text, misfit, _ in told if misfit))
            if not faults:
                assert loaded is not None
                lost = lost_members(loaded.state["optimizer"], [name for _, _, names in told for name in names])
                if lost:
                    raise MisfitError(f"{folder}: {lost}")
                return self._take(loaded, passed_over, has_model="model" in wanted)
            passed_over += faults
            self._damaged.add(Path(folder).name)
        hint = "" if len(folders) == 1 else "none of the checkpoints is good: "
        raise CheckpointError(hint + "; ".join(passed_over))

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, the newest last."""
        return [manifest.step for manifest in complete(self.folder)]

    def folders(self) -> list[Path]:
        """Return the folders of the complete checkpoints, the newest last."""
        return [manifest.folder for manifest in complete(self.folder)]

    def close(self) -> None:
        """Wait for what is under way here; asks nothing of the other processes, which may be gone."""
        self._close(_LEAVE_SECONDS)

    def _close(self, seconds: float) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.hurry(min(seconds, self.patience_seconds))
        saving.wait()
        if saving.fault or saving.failure:
            self._failed(saving, saving.failure or saving.fault)
        elif saving.is_complete:
            self._saved(saving)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # one that is gone, or stopped, writes nothing any more
        self._close(_LOST_SECONDS if isinstance(error, (HangError, LostError)) else _LEAVE_SECONDS)

    # ---- saving

    def _collect(self, step: int, notes: Mapping[str, Any], *, is_dry: bool = False) -> Snapshot | None:
        """Return what this process saves; None where the step is there. What one cannot save is an error in all."""
        fault: Exception | None = None
        snapshot, is_there = None, False
        try:
            if self._process == 0 and (why := self.fence()):
                raise UsageError(f"{why}; nothing was saved")
            if self._process == 0 and not is_dry:
                # the other processes begin to write only when this one has told them
                self._is_swept = self._is_swept or sweep(self.folder, self._disk)
                is_there = self._is_there(step)
            snapshot = self._content.collect(step, notes) if not is_there else None
        except Exception as error:  # also of the caller's own state_dict(): others must not wait for this process
            fault = error
        told = self._group.gather(["" if fault is None else str(fault) or repr(fault), is_there])
        if fault is not None:
            raise fault
        faults = list(dict.fromkeys(text for text, _ in told if text))
        if faults:
            raise UsageError(f"another process cannot save: {'; '.join(faults)}")
        return None if told[0][1] else snapshot

    def _is_there(self, step: int) -> bool:
        """Say whether a step has a good checkpoint of this training."""
        folder = self.folder / folder_name(step)
        if not folder.exists():
            return False
        is_left = self._restored_step is not None and step > self._restored_step and step not in self._own
        if is_left:  # of the past that was left when an older one was taken up
            return False
        try:
            is_good = not faults_of(read_manifest(folder))
        except CheckpointError:
            is_good = False
        return is_good

    def _settle(self) -> None:
        """Wait for the save under way, and tell all processes how it ended."""
        saving = self._saving  # it stays here while others may turn out to be gone: then close() has it to hurry
        if saving is None:
            return
        saving.wait_written()
        faults = self._group.gather(saving.fault)
        saving.others_fault = "; ".join(f"process {n}: {fault}" for n, fault in enumerate(faults) if fault)
        saving.wait()
        failure, complaint = self._group.gather([saving.failure, saving.complaint])[0]
        self._saving = None
        if failure:
            if self._process == 0:
                saving.clear()
            self._failed(saving, failure)
        else:
            self._saved(saving)
        if complaint:
            self._warn(
                f"the checkpoint of step {saving.job.step} is complete, but `latest` or older ones could not be "
                f"changed: {complaint}"
            )

    def _saved(self, saving: Saving) -> None:
        self._own.add(saving.job.step)
        if self.on_saved is not None and not saving.is_told:
            saving.is_told = True
            self.on_saved(saving.job.step, saving.job.final)

    def _failed(self, saving: Saving, failure: str) -> None:
        text = (
            f"the checkpoint of step {saving.job.step} was NOT saved in {self.folder}: {failure}. The training goes "
            "on, and earlier checkpoints are as they were"
        )
        self.failures.append(text)
        self._warn(text)

    def _warn(self, text: str) -> None:
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    # ---- restoring

    def _candidates(self, source: str | Path | int) -> list[str]:
        """Return the folders to try, the newest first; the first process looks for all."""
        folders: list[str] = []
        fault = ""
        if self._process == 0:
            try:
                folders = [str(path) for path in self._look_for(source)]
            except (CheckpointError, UsageError) as error:
                fault = str(error)
        told = self._group.gather([folders, fault])[0]
        if told[1]:
            raise CheckpointError(told[1])
        found_folders: list[str] = told[0]
        return found_folders

    def _look_for(self, source: str | Path | int) -> list[Path]:
        if isinstance(source, int) and not isinstance(source, bool):
            folder = self.folder / folder_name(source)
            if not folder.is_dir():
                there = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(f"{self.folder}: has no checkpoint of step {source}; there are: {there}")
            return [folder]
        where = self.folder if source == "newest" else Path(str(source))
        if source != "newest":
            if not where.is_dir():
                raise CheckpointError(f"{where}: there is no such folder")
            if (where / "MANIFEST.json").exists():
                return [where]
        every = [path for path, _, _, _ in found(where)]
        if source != "newest" and not every:
            raise CheckpointError(f"{where}: holds no checkpoint")
        return every[::-1]

    def _try_to_load(self, folder: Path, parts: frozenset[str]) -> tuple[Loaded | None, str, bool]:
        try:
            manifest: Manifest = read_manifest(folder)
            loaded = load(
                manifest, self._content, process=self._process, num_processes=self._num_processes, parts=parts
            )
        except MisfitError as error:
            return None, str(error) if str(folder) in str(error) else f"{folder}: {error}", True
        except CheckpointError as error:
            return None, str(error), False
        return loaded, "", False

    def _take(self, loaded: Loaded, passed_over: list[str], *, has_model: bool) -> Restored:
        fault: MisfitError | None = None
        try:
            put_back = self._content.load_around(loaded.prepared, loaded.state)
        except MisfitError as error:
            fault = error
        told = next((text for text in self._group.gather("" if fault is None else str(fault)) if text), "")
        if told:  # the model is as it was, in all processes
            if fault is None:
                put_back()
            raise MisfitError(f"{loaded.manifest.folder}: {told}") from fault
        if has_model:  # also where this lane has no tensors: all processes load together
            self._content.load_model(loaded.tensors, loaded.loss)
        step = loaded.manifest.step
        self._own = {step} if loaded.manifest.folder.parent.resolve() == self.folder.resolve() else set()
        self._restored_step = step
        if passed_over:
            self._warn(f"went back to the checkpoint of step {step}: {'; '.join(passed_over)}")
        return Restored(step, loaded.manifest.folder, from_plain(loaded.state["notes"]), tuple(passed_over))


def _several(thing: Any) -> list[Any]:  # noqa: ANN401 - one or several
    if thing is None:
        return []
    has_state = callable(getattr(thing, "state_dict", None))
    return [thing] if has_state or not isinstance(thing, Iterable) else list(thing)
