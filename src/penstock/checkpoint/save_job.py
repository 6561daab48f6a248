"""Save job: write one checkpoint to disk, in a thread beside the training.

Every process writes its shards into a temporary folder, and then a part file that lists them. The first process waits
for all part files, writes the manifest and renames the folder. The processes communicate only through these files, so
a save never interferes with the messages of the training.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.content import versions
from penstock.checkpoint.optimizer_states import merged
from penstock.checkpoint.reader import readable
from penstock.errors import CheckpointError
from penstock.tensor_files.disk import Disk, folder_lock
from penstock.tensor_files.manifest import MANIFEST, Manifest, folder_name, read_json, to_bytes
from penstock.tensor_files.tensor_shards import checksum, write_shard

INDEX = "model.safetensors.index.json"
_POLL_SECONDS = (0.002, 0.05)
_HURRY_SECONDS = 10.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Job:
    """What to write, and where."""

    folder: Path  # of all checkpoints
    mark: str  # makes the name of the temporary folder unique
    step: int
    process: int  # the number of this process; process 0 completes the checkpoint
    num_processes: int  # that write
    files: Mapping[str, Mapping[str, torch.Tensor]]  # the shards of this process
    part: Mapping[str, Any]  # the data that this process reports to the first
    state: Mapping[str, Any]  # the data that only the first process writes
    plan: Mapping[str, Any]  # the plan of the pipeline
    aliases: Mapping[str, str]  # additional names of tensors
    keep: int | None  # the number of checkpoints to keep; None keeps all
    waits: Sequence[Callable[[], None]]  # functions that wait until the tensors can be read
    patience_seconds: float  # how long the first process waits while no other process writes anything
    damaged: frozenset[str] = frozenset()  # folders of checkpoints that do not count towards `keep`
    fence: Callable[[], str] = str  # returns a reason if this training must no longer write here, otherwise ""

    @property
    def hidden(self) -> Path:
        """The temporary folder."""
        return self.folder / f"tmp-{self.step:06d}-{self.mark}"

    @property
    def final(self) -> Path:
        """The folder of the complete checkpoint."""
        return self.folder / folder_name(self.step)

    @property
    def num_bytes(self) -> int:
        """The size of this process's shards."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())


class Saving:
    """A save in progress."""

    def __init__(self, job: Job, disk: Disk) -> None:
        self.job, self._disk = job, disk
        self.fault = ""  # why this process could not write its shards
        self.failure = ""  # why the checkpoint did not become complete; only the first process knows it
        self.complaint = ""  # an error after the checkpoint was complete
        self.is_complete = False  # only the first process knows it
        self.is_told = False  # whether `on_saved` was called
        self.others_fault = ""  # set by the caller's thread if another process could not write
        self._written = threading.Event()
        self._is_hurried, self._hurry_seconds = False, _HURRY_SECONDS
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {job.step}")
        self._thread.start()

    def wait_written(self) -> None:
        """Wait until this process has written its shards, or has failed."""
        self._written.wait()

    def wait(self) -> None:
        """Wait until this process has finished its part."""
        self._thread.join()

    def hurry(self, seconds: float) -> None:
        """From now on, wait at most this long while no other process writes: the training has ended."""
        self._is_hurried, self._hurry_seconds = True, seconds

    def clear(self) -> None:
        """Delete the remains of a failed save."""
        self._disk.remove(self.job.hidden)

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                self._disk.make_folder(self.job.folder)
                stack.enter_context(folder_lock(self.job.folder))
                self._write()
            except Exception as error:  # the training goes on after any error
                self.fault = self._error_text(error)
            finally:
                self._written.set()
            if self.job.process == 0:
                try:
                    self._complete()
                except Exception as error:
                    self.failure = self._error_text(error)

    def _error_text(self, error: Exception) -> str:
        """Return the message of an error; if the disk is full, also the bytes needed and free."""
        text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        text = text or type(error).__name__
        if not isinstance(error, OSError) or error.errno not in _NO_SPACE:
            return text
        try:
            free = shutil.disk_usage(self.job.folder).free
        except OSError:
            return text
        return f"{text}; bytes needed: {self.job.num_bytes}, free: {free}"

    # ---- every process

    def _write(self) -> None:
        job, disk = self.job, self._disk
        for wait in job.waits:
            wait()
        disk.make_folder(job.hidden)
        files: dict[str, Any] = {}
        try:
            for name, tensors in job.files.items():
                files[name] = write_shard(disk, job.hidden / name, tensors)
            self._write_part({**job.part, "files": files})
        except BaseException as error:
            for name in files:  # free space for other processes if the disk is full
                disk.remove(job.hidden / name)
            if job.process:
                self._try_to_report(error)
            raise

    def _write_part(self, part: Mapping[str, Any]) -> None:
        path = self._part_path(self.job.process)
        hidden = path.with_suffix(".writing")
        self._disk.write_file(hidden, [to_bytes(part)])
        self._disk.replace(hidden, path)

    def _try_to_report(self, error: BaseException) -> None:
        try:
            self._write_part({"failed": self._error_text(error) if isinstance(error, Exception) else str(error)})
        except OSError:  # the first process then learns of it at the next save
            return

    def _part_path(self, process: int) -> Path:
        return self.job.hidden / f"part-{process:05d}.json"

    # ---- the first process

    def _complete(self) -> None:
        job, disk = self.job, self._disk
        if self.fault:
            raise CheckpointError(self.fault)
        parts = [self._wait_for(process) for process in range(job.num_processes)]
        for process in range(job.num_processes):
            disk.remove(self._part_path(process))
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        optimizer = merged(parts) if job.state["has_optimizer"] else None
        state = {**job.state, "optimizer": optimizer, "random": [part["random"] for part in parts if part["random"]]}
        files["state.json"] = self._write_json("state.json", state)
        files[INDEX] = self._write_json(INDEX, _index(files))
        orders = [manifest.order for manifest in readable(job.folder)]
        manifest = Manifest(job.hidden, job.step, max(orders, default=0) + 1, job.plan, versions(), job.aliases, files)
        disk.write_file(job.hidden / MANIFEST, [manifest.to_bytes()])
        disk.sync_folder(job.hidden)
        if why := job.fence():
            raise CheckpointError(why)
        # it is damaged, or an older checkpoint was restored and training reached this step again
        if job.final.exists():
            disk.replace(job.final, job.folder / f"aside-{job.step:06d}-{job.mark}")
        disk.replace(job.hidden, job.final)
        disk.sync_folder(job.folder)
        if not orders:  # the folder itself is new
            disk.sync_folder(job.folder.parent)
        self.is_complete = True
        try:
            disk.replace_file(job.folder / "latest", f"{job.final.name}\n".encode(), mark=job.mark)
            if job.keep is not None:
                self._delete_old(job.keep)
        except OSError as error:
            self.complaint = f"{error.strerror}: {error.filename}"

    def _write_json(self, name: str, plain: Mapping[str, Any]) -> dict[str, Any]:
        content = to_bytes(plain)
        return {"bytes": self._disk.write_file(self.job.hidden / name, [content]), "xxh3": checksum(content)}

    def _wait_for(self, process: int) -> Mapping[str, Any]:
        """Return the part of a process once it exists; raise if no process writes anything for too long."""
        pause, seen, since = _POLL_SECONDS[0], -1, time.monotonic()
        path = self._part_path(process)
        while not path.exists():
            if self.others_fault:
                raise CheckpointError(self.others_fault)
            now = self._num_bytes_written()
            if now != seen:
                seen, since = now, time.monotonic()
            is_ending = self._is_hurried or not threading.main_thread().is_alive()
            patience = min(self._hurry_seconds, self.job.patience_seconds) if is_ending else self.job.patience_seconds
            if time.monotonic() - since > patience:
                raise CheckpointError(
                    f"process {process} did not write its part, and no process wrote anything for {patience:g} s"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        part = read_json(path)
        if "failed" in part:
            raise CheckpointError(f"process {process}: {part['failed']}")
        return part

    def _num_bytes_written(self) -> int:
        try:
            return sum(path.stat().st_size for path in self.job.hidden.iterdir())
        except OSError:
            return 0

    def _delete_old(self, keep: int) -> None:
        """Delete all but the newest; rename each first, so that no half-deleted checkpoint keeps a valid name."""
        complete = readable(self.job.folder)
        good = [manifest for manifest in complete if manifest.folder.name not in self.job.damaged]
        first = good[-keep:][0].order if good else 0  # order of the oldest to keep
        for manifest in (manifest for manifest in complete if manifest.order < first):
            doomed = self.job.folder / f"tmp-old-{manifest.step:06d}-{self.job.mark}"
            self._disk.replace(manifest.folder, doomed)
            self._disk.remove(doomed)


def _index(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the index file that Hugging Face loaders expect."""
    shards = {name: entry for name, entry in files.items() if name.startswith("model-")}
    return {
        "metadata": {"total_size": sum(entry["bytes"] - entry["header_bytes"] for entry in shards.values())},
        "weight_map": {tensor: name for name, entry in shards.items() for tensor in entry["tensors"]},
    }
