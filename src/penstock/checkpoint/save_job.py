"""Saving: one checkpoint on its way to the disk, in a thread beside the training.

Every process writes its shards into a folder that nobody reads, then a part file that tells what it wrote. The first
process waits for all part files, writes the manifest and gives the folder its name. The processes need no words with
each other but these files, so nothing of this meets the training's own messages.
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
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.leftovers import held
from penstock.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    folder_name,
    read_json,
    read_manifest,
    step_folders,
    to_bytes,
)
from penstock.checkpoint.optimizer_states import merged
from penstock.checkpoint.tensor_shards import checksum, write_shard
from penstock.errors import CheckpointError

__all__ = ["Job", "Saving"]

INDEX = "model.safetensors.index.json"
_POLL_SECONDS = (0.002, 0.05)
_HURRY_SECONDS = 10.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Job:
    """What is to be written where.

    Attributes:
        folder: of all checkpoints.
        mark: makes the name of the folder that nobody reads its own.
        step: of the training.
        process: the number of this one; the first completes the checkpoint.
        num_processes: that write.
        files: the shards of this process.
        part: what it tells the first.
        state: what only the first tells.
        plan: of the pipeline.
        aliases: other names of tensors.
        keep: how many checkpoints stay; None: all.
        waits: what to wait for before the tensors are read.
        patience_seconds: that the first process waits for others while none of them writes anything.
        damaged: folders of checkpoints that do not count among those that stay.
        fence: says why this training may not write here any more, once it may not.
    """

    folder: Path
    mark: str
    step: int
    process: int
    num_processes: int
    files: Mapping[str, Mapping[str, torch.Tensor]]
    part: Mapping[str, Any]
    state: Mapping[str, Any]
    plan: Mapping[str, Any]
    aliases: Mapping[str, str]
    keep: int | None
    waits: Sequence[Callable[[], None]]
    patience_seconds: float
    damaged: frozenset[str] = frozenset()
    fence: Callable[[], str] = str

    @property
    def hidden(self) -> Path:
        """Where it is written."""
        return self.folder / f"tmp-{self.step:06d}-{self.mark}"

    @property
    def final(self) -> Path:
        """Where it is when it is complete."""
        return self.folder / folder_name(self.step)

    @property
    def num_bytes(self) -> int:
        """What the shards of this process take."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())


class Saving:
    """A save under way.

    Attributes:
        fault: why this process could not write its shards, or "".
        failure: why the checkpoint did not become complete, or ""; known to the first process.
        is_complete: whether it is there under its name; known to the first process.
        complaint: what did not work after it was complete.
        is_told: whether the caller has been told that it is complete.
    """

    def __init__(self, job: Job, disk: Disk) -> None:
        self.job, self._disk = job, disk
        self.fault = self.failure = self.complaint = ""
        self.is_complete = self.is_told = False
        self.others_fault = ""  # set by the caller's thread, when it hears that another process could not write
        self._written = threading.Event()
        self._is_hurried, self._hurry_seconds = False, _HURRY_SECONDS
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {job.step}")
        self._thread.start()

    def wait_written(self) -> None:
        """Wait until the shards of this process are written, or have failed."""
        self._written.wait()

    def wait(self) -> None:
        """Wait until all is done that this process has to do."""
        self._thread.join()

    def hurry(self, seconds: float) -> None:
        """Wait for other processes no longer than this, once they write nothing: the training has ended."""
        self._is_hurried, self._hurry_seconds = True, seconds

    def clear(self) -> None:
        """Delete what is left of a save that failed."""
        self._disk.remove(self.job.hidden)

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                self._disk.make_folder(self.job.folder)
                stack.enter_context(held(self.job.folder))
                self._write()
            except Exception as error:  # whatever it is, the training goes on
                self.fault = self._told(error)
            finally:
                self._written.set()
            if self.job.process == 0:
                try:
                    self._complete()
                except Exception as error:
                    self.failure = self._told(error)

    def _told(self, error: Exception) -> str:
        """Return what went wrong; where it was the room, also how much there is and was needed."""
        text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        text = text or type(error).__name__
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
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
            for name in files:  # room for others, where the disk is full
                disk.remove(job.hidden / name)
            if job.process:
                self._try_to_tell(error)
            raise

    def _write_part(self, part: Mapping[str, Any]) -> None:
        path = self._part_path(self.job.process)
        hidden = path.with_suffix(".writing")
        self._disk.write_file(hidden, [to_bytes(part)])
        self._disk.replace(hidden, path)

    def _try_to_tell(self, error: BaseException) -> None:
        try:
            self._write_part({"failed": self._told(error) if isinstance(error, Exception) else str(error)})
        except OSError:  # then the first process hears it at the next save
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
        orders = [manifest.order for manifest in _readable(job.folder)]
        manifest = Manifest(job.hidden, job.step, max(orders, default=0) + 1, job.plan, versions(), job.aliases, files)
        disk.write_file(job.hidden / MANIFEST, [manifest.to_bytes()])
        disk.sync_folder(job.hidden)
        if why := job.fence():
            raise CheckpointError(why)
        if job.final.exists():  # it is damaged, or of a past that was left
            disk.replace(job.final, job.folder / f"aside-{job.step:06d}-{job.mark}")
        disk.replace(job.hidden, job.final)
        disk.sync_folder(job.folder)
        if not orders:  # the folder itself is new
            disk.sync_folder(job.folder.parent)
        self.is_complete = True
        try:
            disk.write_beside(job.folder / "latest", f"{job.final.name}\n".encode(), mark=job.mark)
            if job.keep is not None:
                self._delete_old(job.keep)
        except OSError as error:
            self.complaint = f"{error.strerror}: {error.filename}"

    def _write_json(self, name: str, plain: Mapping[str, Any]) -> dict[str, Any]:
        content = to_bytes(plain)
        return {"bytes": self._disk.write_file(self.job.hidden / name, [content]), "xxh3": checksum(content)}

    def _wait_for(self, process: int) -> Mapping[str, Any]:
        """Return what a process has told, once it has; give up when nothing is written any more."""
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
                    f"process {process} has not written its part, and nothing was written for {patience:g} s"
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
        """Delete all but the newest; under another name first, so that none is ever seen half deleted."""
        complete = sorted(_readable(self.job.folder), key=lambda manifest: manifest.order)
        good = [manifest for manifest in complete if manifest.folder.name not in self.job.damaged]
        first = good[-keep:][0].order if good else 0  # of those that stay
        for manifest in (manifest for manifest in complete if manifest.order < first):
            doomed = self.job.folder / f"tmp-old-{manifest.step:06d}-{self.job.mark}"
            self._disk.replace(manifest.folder, doomed)
            self._disk.remove(doomed)


def _readable(folder: Path) -> list[Manifest]:
    found = []
    for _, path in step_folders(folder):
        try:
            found.append(read_manifest(path))
        except CheckpointError:
            continue
    return found


def _index(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the index that Hugging Face's loaders look for."""
    shards = {name: entry for name, entry in files.items() if name.startswith("model-")}
    return {
        "metadata": {"total_size": sum(entry["bytes"] - entry["header_bytes"] for entry in shards.values())},
        "weight_map": {tensor: name for name, entry in shards.items() for tensor in entry["tensors"]},
    }
