"""Checkpoints: save the state of a training while it runs, and restore it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from penstock.checkpoint.content import PARTS, Content, Snapshot
from penstock.checkpoint.host_copies import Staging
from penstock.checkpoint.optimizer_states import lost_members
from penstock.checkpoint.reader import Loaded, Restored, complete, faults_of, found, load
from penstock.checkpoint.save_job import Job, Saving
from penstock.checkpoint.state_as_json import from_plain
from penstock.errors import CheckpointError, HangError, LostError, UsageError, warn_user
from penstock.pipeline.pipeline import Pipeline
from penstock.tensor_files.disk import Disk, sweep
from penstock.tensor_files.manifest import MisfitError, folder_name, read_manifest

_NO_NOTES: Mapping[str, Any] = MappingProxyType({})
_MAX_STEP = 10**18
_END_SECONDS, _LOST_SECONDS = 10.0, 1.0  # wait this long for other processes to write, after training ended


class Checkpoints:
    """The checkpoints of a training, in one folder.

    `save` copies everything to host memory and returns; a thread writes the copy to disk. A checkpoint gets its name
    only once it is complete and on the disk, and nothing writes to it afterwards. Tensors are stored under the model's
    own names, so any number of lanes can load them, as threads or processes, and with another schedule.

    Under torchrun, every process makes one with the same arguments and calls the same methods. All processes must see
    the folder.

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
        folder: the folder of the checkpoints; the first save creates it.
        pipe: the pipeline.
        optimizer: the optimizer of the pipeline's parameters, or several, as in `pipe.optimizers.values()`.
        scheduler: the learning-rate scheduler, or several.
        scaler: the pipeline's GradScaler.
        data: the source of the batches, for example a feed: any object with `state_dict()` and `load_state_dict()`.
        keep: the number of newest checkpoints to keep; older ones are deleted when a new one is complete.

    Attributes:
        failures: messages of failed saves; each was also a warning, and the training went on.
        patience_seconds: how long the first process waits for the others' parts while none of them writes anything.
        on_saved: called with the step and folder of each complete checkpoint, at the next `save`, `wait` or `poll`.
        fence: called in the first process before a save begins and before it becomes complete. If it returns a
            reason, nothing is saved and an error is raised.

    Raises:
        UsageError: for invalid arguments.
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
            raise UsageError(f"pipe: expected a penstock.Pipeline; given: {type(pipe).__name__}")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise UsageError(f"keep: must be a whole number of at least 1; given: {keep!r}")
        self.folder = Path(folder).absolute()  # the training may change its working directory
        self._keep, self._group = keep, pipe.internals.group
        self._process = pipe.lanes[0] if len(pipe.lanes) < pipe.schedule.num_lanes else 0
        self._num_processes = pipe.schedule.num_lanes // len(pipe.lanes)
        self._content = Content(pipe, _as_list(optimizer), _as_list(scheduler), scaler, data)
        self.failures: list[str] = []
        self.on_saved: Callable[[int, Path], None] | None = None
        self.fence: Callable[[], str] = str  # returns ""
        self.patience_seconds = 120.0
        self._disk, self._staging = Disk(), Staging(len(pipe.lanes))
        self._saving: Saving | None = None
        self._own: set[int] = set()  # steps saved or restored here
        self._restored_step: int | None = None
        self._damaged: set[str] = set()  # folders skipped by restore
        self._num_saves, self._is_swept = 0, False
        is_file = self.folder.exists() and not self.folder.is_dir()
        fault = f"folder: {self.folder} is not a folder" if is_file and self._process == 0 else ""
        fault, self._nonce = self._group.control.gather([fault, secrets.token_hex(4)])[0]
        if fault:
            raise UsageError(fault)

    def save(self, step: int, *, notes: Mapping[str, Any] = _NO_NOTES, wait: bool = False) -> None:
        """Save everything as it is now; return when it is copied to host memory.

        Only one save runs at a time: the next call waits until the last one is on the disk. A step that already has a
        good checkpoint is not saved again. A failed write causes a warning and an entry in `failures`; the training
        goes on.

        Args:
            step: the number of completed steps.
            notes: your own data, which JSON can hold; `restore` returns it.
            wait: wait until the checkpoint is complete.

        Raises:
            UsageError: for an invalid step, or a state that cannot be saved.
        """
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEP:
            raise UsageError(f"step: must be a whole number of at least 0; given: {step!r}")
        self.wait()
        snapshot = self._collect(step, notes)
        if snapshot is None:
            if step not in self._own:
                where = self.folder / folder_name(step)
                warn_user(
                    f"{where} already exists, and this training neither saved nor restored it: nothing was saved. "
                    "Choose another folder, or call restore() first",
                    RuntimeWarning,
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
        """Check that the current state can be saved; write nothing.

        Raises:
            UsageError: for a state that cannot be saved, in all processes.
        """
        self._collect(0, _NO_NOTES, is_dry=True)

    def wait(self) -> None:
        """Wait until the current save is complete or has failed."""
        saving = self._saving  # stays set: if other processes turn out to be gone, close() hurries it
        if saving is None:
            return
        saving.wait_written()
        faults = self._group.control.gather(saving.fault)  # all processes share the result
        saving.others_fault = "; ".join(f"process {n}: {fault}" for n, fault in enumerate(faults) if fault)
        saving.wait()
        failure, complaint = self._group.control.gather([saving.failure, saving.complaint])[0]
        self._saving = None
        if failure:
            if self._process == 0:
                saving.clear()
            self._failed(saving, failure)
        else:
            self._saved(saving)
        if complaint:
            warn_user(
                f"the checkpoint of step {saving.job.step} is complete, but `latest` or older checkpoints could not be "
                f"updated: {complaint}",
                RuntimeWarning,
            )

    def poll(self) -> None:
        """Call `on_saved` if the save is complete, without waiting; only the first process knows this early."""
        if self._saving is not None and self._saving.is_complete:
            self._saved(self._saving)

    def restore(self, source: str | Path | int = "newest", *, parts: Iterable[str] = PARTS) -> Restored | None:
        """Load a checkpoint: the newest good one, or a chosen one.

        Everything is read and checked before anything is changed, and all processes load the same checkpoint.

        Args:
            source: "newest", a step, the folder of a checkpoint, or a folder of checkpoints (the newest one is loaded).
            parts: the parts to load: some of "model", "optimizer", "scheduler", "scaler", "data" and "random"; by
                default everything that was saved.

        Returns:
            A description of the loaded checkpoint; None if there is no checkpoint.

        Raises:
            CheckpointError: if no checkpoint is good, if it is of another model, or if the chosen one is missing or
                damaged.
            UsageError: for unknown parts.
        """
        wanted = frozenset([parts] if isinstance(parts, str) else parts)
        if not wanted or wanted - set(PARTS):
            raise UsageError(f"parts: choose from {', '.join(PARTS)}; given: {', '.join(map(str, wanted)) or 'none'}")
        self.wait()
        folders = self._candidates(source)
        if not folders:
            return None
        passed_over: list[str] = []
        for folder in folders:
            loaded, fault, is_misfit = self._try_to_load(Path(folder), wanted)
            answers = self._group.control.gather([fault, is_misfit, self._content.optimizers.members()])
            faults = list(dict.fromkeys(text for text, _, _ in answers if text))
            if any(misfit for _, misfit, _ in answers):
                raise MisfitError(next(text for text, misfit, _ in answers if misfit))
            if not faults:
                assert loaded is not None
                lost = lost_members(loaded.state["optimizer"], [name for _, _, names in answers for name in names])
                if lost:
                    raise MisfitError(f"{folder}: {lost}")
                return self._apply(loaded, passed_over, has_model="model" in wanted)
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
        """Wait for the current save of this process; the other processes are not contacted, as they may be gone."""
        self._close(_END_SECONDS)

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
        # after these errors the other processes may be gone or stopped, and then write nothing
        self._close(_LOST_SECONDS if isinstance(error, (HangError, LostError)) else _END_SECONDS)

    # ---- saving

    def _collect(self, step: int, notes: Mapping[str, Any], *, is_dry: bool = False) -> Snapshot | None:
        """Return what this process saves, or None if the step is already saved. If one process fails, all raise."""
        fault: Exception | None = None
        snapshot, is_there = None, False
        try:
            if self._process == 0 and (why := self.fence()):
                raise UsageError(f"{why}; nothing was saved")
            if self._process == 0 and not is_dry:
                # the other processes do not write before the gather below
                self._is_swept = self._is_swept or sweep(self.folder, self._disk)
                is_there = self._is_there(step)
            snapshot = self._content.collect(step, notes) if not is_there else None
        except Exception as error:  # the user's own state_dict() too: other processes must not wait for this one
            fault = error
        answers = self._group.control.gather(["" if fault is None else str(fault) or repr(fault), is_there])
        if fault is not None:
            raise fault
        faults = list(dict.fromkeys(text for text, _ in answers if text))
        if faults:
            raise UsageError(f"another process cannot save: {'; '.join(faults)}")
        return None if answers[0][1] else snapshot

    def _is_there(self, step: int) -> bool:
        """Return whether a step has a good checkpoint of this training."""
        folder = self.folder / folder_name(step)
        if not folder.exists():
            return False
        is_stale = self._restored_step is not None and step > self._restored_step and step not in self._own
        if is_stale:  # an older checkpoint was restored, and this one belongs to the abandoned steps after it
            return False
        try:
            return not faults_of(read_manifest(folder))
        except CheckpointError:
            return False

    def _saved(self, saving: Saving) -> None:
        self._own.add(saving.job.step)
        if self.on_saved is not None and not saving.is_told:
            saving.is_told = True
            self.on_saved(saving.job.step, saving.job.final)

    def _failed(self, saving: Saving, failure: str) -> None:
        text = (
            f"the checkpoint of step {saving.job.step} was NOT saved in {self.folder}: {failure}. The training goes "
            "on; earlier checkpoints are unchanged"
        )
        self.failures.append(text)
        warn_user(text, RuntimeWarning)

    # ---- restoring

    def _candidates(self, source: str | Path | int) -> list[str]:
        """Return the folders to try, the newest first; the first process lists them for all."""
        folders: list[str] = []
        fault = ""
        if self._process == 0:
            try:
                folders = [str(path) for path in self._look_for(source)]
            except (CheckpointError, UsageError) as error:
                fault = str(error)
        listed: tuple[list[str], str] = self._group.control.gather([folders, fault])[0]
        if listed[1]:
            raise CheckpointError(listed[1])
        return listed[0]

    def _look_for(self, source: str | Path | int) -> list[Path]:
        if isinstance(source, int) and not isinstance(source, bool):
            folder = self.folder / folder_name(source)
            if not folder.is_dir():
                there = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(f"{self.folder}: has no checkpoint of step {source}; existing steps: {there}")
            return [folder]
        where = self.folder if source == "newest" else Path(str(source))
        if source != "newest":
            if not where.is_dir():
                raise CheckpointError(f"{where}: no such folder")
            if (where / "MANIFEST.json").exists():
                return [where]
        every = [path for _, path, _ in found(where)]
        if source != "newest" and not every:
            raise CheckpointError(f"{where}: contains no checkpoint")
        return every[::-1]

    def _try_to_load(self, folder: Path, parts: frozenset[str]) -> tuple[Loaded | None, str, bool]:
        try:
            manifest = read_manifest(folder)
            loaded = load(
                manifest, self._content, process=self._process, num_processes=self._num_processes, parts=parts
            )
        except MisfitError as error:
            return None, str(error) if str(folder) in str(error) else f"{folder}: {error}", True
        except CheckpointError as error:
            return None, str(error), False
        return loaded, "", False

    def _apply(self, loaded: Loaded, passed_over: list[str], *, has_model: bool) -> Restored:
        fault: MisfitError | None = None
        try:
            undo = self._content.load_all_but_model(loaded.prepared, loaded.state)
        except MisfitError as error:
            fault = error
        refusal = next((text for text in self._group.control.gather("" if fault is None else str(fault)) if text), "")
        if refusal:  # the model is unchanged in all processes
            if fault is None:
                undo()
            raise MisfitError(f"{loaded.manifest.folder}: {refusal}") from fault
        if has_model:  # even if this lane has no tensors: all processes load together
            self._content.load_model(loaded.tensors, loaded.loss)
        step = loaded.manifest.step
        self._own = {step} if loaded.manifest.folder.parent.resolve() == self.folder.resolve() else set()
        self._restored_step = step
        if passed_over:
            warn_user(f"went back to the checkpoint of step {step}: {'; '.join(passed_over)}", RuntimeWarning)
        return Restored(step, loaded.manifest.folder, from_plain(loaded.state["notes"]), tuple(passed_over))


def _as_list(thing: Any) -> list[Any]:  # noqa: ANN401 - one or several
    if thing is None:
        return []
    has_state = callable(getattr(thing, "state_dict", None))
    return [thing] if has_state or not isinstance(thing, Iterable) else list(thing)
