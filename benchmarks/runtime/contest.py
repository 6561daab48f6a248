"""Run contenders in the same processes, in turn, so that load on the machine affects all of them."""

# ruff: noqa: ANN401 - tensors, but only the workers import torch
from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from tasks import Case, Task, count_saved, forget, make

Lane = list[tuple[str, int, int]]
MOST_SECONDS = 120  # the longest time without a message; then the processes of a job are stopped
TOLERANCE = 1e-4  # for float32 gradients, relative to the largest of the plain model


class Contender(Protocol):
    """Something that trains a case's model in stages."""

    def step(self, batch: Any, target: Any) -> Any:
        """Run forward and backward; return the loss if this process knows it."""
        ...

    def gradients(self) -> dict[str, Any]:
        """Return the gradients in this process, by stage and name."""
        ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """A case, the order of its actions, its contenders and the number of rounds."""

    case: Case
    lanes: list[Lane]
    lane_of: list[int]
    contenders: tuple[str, ...]
    rounds: int
    is_predicted: bool = False  # also predict the step, from a profile that all processes make at once

    @property
    def num_processes(self) -> int:
        return 1 if self.case.threads else self.case.lanes

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.lanes))


@dataclass
class Result:
    """The measurements: one number per round for each contender."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)  # of all processes together
    errors: dict[str, float] = field(default_factory=dict)  # relative to the plain model's loss and gradients
    orders: dict[str, list[str]] = field(default_factory=dict)  # for contenders that make their own order
    saved_bytes: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)  # stages alone; peak per lane
    predicted_seconds: list[float] = field(default_factory=list)  # one per round, from a profile made in that round
    nap_seconds: float = 0.0  # of one nap, while all lanes only sleep; the part above 10 ms is due to the machine
    failures: dict[str, str] = field(default_factory=dict)


def run(job: Job) -> Result:
    """Run a job in new processes. If a contender fails, note it and run the others without it."""
    failures: dict[str, str] = {}
    while True:
        left = tuple(name for name in job.contenders if name not in failures)
        if not left:
            return Result(failures=failures)
        found = _attempt(replace(job, contenders=left))
        if isinstance(found, Result):
            found.failures = failures
            return found
        name, why = found
        if name not in left:
            raise RuntimeError(why)
        failures[name] = why


def run_elsewhere(python: Path, job: Job) -> Result:
    """Run a job with the interpreter of another environment."""
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "job", Path(folder) / "result"
        given.write_bytes(pickle.dumps(job))
        ran = subprocess.run([python, __file__, given, answer], check=False, capture_output=True, text=True)
        if ran.returncode:
            return Result(failures=dict.fromkeys(job.contenders, ran.stderr.strip().splitlines()[-1]))
        return pickle.loads(answer.read_bytes())


def _attempt(job: Job) -> Result | tuple[str, str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "tasks"])
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_work, args=(job, rank, Path(folder) / "store", answers), daemon=True)
            for rank in range(job.num_processes)
        ]
        for worker in workers:
            worker.start()
        try:
            return _first_answer(workers, answers)
        finally:
            for worker in workers:
                worker.join(5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _first_answer(workers: list[Any], answers: Any) -> Result | tuple[str, str]:
    """Return the result, or the contender that failed and why.

    If no process names the contender, it is the one that rank 0 worked on.
    """
    at, end = "", time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        try:
            kind, payload = answers.get(timeout=1.0)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
            if dead:
                return at, f"a process ended with exit code {dead[0]}"
            continue
        if kind != "at":
            return payload
        at, end = payload, time.monotonic() + MOST_SECONDS
    return at, f"no news for {MOST_SECONDS} s"


def _work(job: Job, rank: int, store: Path, answers: Any) -> None:
    """Run one process of a job."""
    at, code = "", 0

    def tell(name: str) -> None:
        nonlocal at
        at = name
        if rank == 0:
            answers.put(("at", name))

    try:
        result = _Worker(job, rank, store).run(tell)
        if rank == 0:
            answers.put(("done", result))
    except BaseException as error:
        code, text = 1, "".join(traceback.format_exception(error))
        if "Connection closed by peer" not in text:  # the process that failed first gives a better message
            answers.put(("failed", (at, text)))
        time.sleep(1.0)
    finally:
        answers.close()
        answers.join_thread()
        os._exit(code)  # exit even if a failed contender left threads behind


class _Worker:
    def __init__(self, job: Job, rank: int, store: Path) -> None:
        import torch
        import torch.distributed as dist

        self.job, self.rank, self.world = job, rank, job.num_processes
        self.torch, self.dist = torch, dist
        torch.set_num_threads(1)
        if self.world > 1:
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(self.world)}
            os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world)}
            limit = timedelta(seconds=60)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=self.world, timeout=limit
            )

    def run(self, tell: Any) -> Result:
        self.tasks: dict[str, Task] = {}
        self.empty: Any = None  # a pipeline with the same schedule and almost no work
        self.contenders: dict[str, Contender] = {}
        result = Result()
        expected = self._expect()
        for name in self.job.contenders:
            tell(name)
            task = make(self.job.case)
            alone = count_saved(task, self.job.lane_of) if self.job.case.is_counted else []
            self.tasks[name], self.contenders[name] = task, self._make(name, task)
            result.errors[name] = self._check(name, expected)
            if hasattr(self.contenders[name], "order") and (order := self.contenders[name].order()):
                result.orders[name] = order
            if task.counts is not None:
                gc.collect()
                result.saved_bytes[name] = alone, []
                for count in task.counts:
                    count.peak_bytes = 0  # a first step may include dry runs
        for turn in range(self.job.rounds + 1):  # the first round warms up
            names = list(self.job.contenders)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                tell(name)
                seconds, cpu_seconds = self._time(name)
                if turn:
                    result.seconds.setdefault(name, []).append(seconds)
                    result.cpu_seconds.setdefault(name, []).append(cpu_seconds)
            if turn and self.job.is_predicted:
                tell("predicted")
                result.predicted_seconds.append(self._predict())
        result.nap_seconds = self._nap()
        for name, (_, peaks) in result.saved_bytes.items():
            peaks.extend(self._peaks(self.tasks[name]))
        if self.empty is not None:
            self.empty.close()
        for name, contender in self.contenders.items():
            tell(name)
            contender.close()
        self._meet()
        return result

    def _make(self, name: str, task: Task) -> Contender:
        job = self.job
        if name == "floor" and job.case.threads:
            from floor_threads import FloorOfThreads

            return FloorOfThreads(task, job.lanes, job.lane_of, job.case.micro_batches)
        if name == "floor":
            from floor import Floor

            return Floor(task, job.lanes, job.lane_of, job.case.micro_batches)
        if name.startswith("peer"):
            from peer import Peer

            return Peer(job.case, task, job.lane_of, job.lanes if name == "peer, same order" else None)
        if name.startswith("ours"):
            from ours import Ours

            how = name.partition(", ")[2]
            return Ours(job.case, task, transport=how if how == "gloo" else "auto", is_recorded=how == "recorded")
        if name in ("torchgpipe", "fairscale"):
            from others import GPipes

            return GPipes(name, job.case, task)
        if name == "deepspeed":
            from others import DeepSpeed

            return DeepSpeed(job.case, task, job.lane_of)
        return Plain(task, job.case.micro_batches if name == "plain" else 1)

    def _expect(self) -> tuple[float, dict[str, Any]]:
        """Return the loss and the gradients of the plain model."""
        task = make(self.job.case.without_sleep())
        if self.job.case.is_counted:
            count_saved(task, self.job.lane_of)  # so that parameters have the same names
        return float(task.plain()), task.gradients()

    def _check(self, name: str, expected: tuple[float, dict[str, Any]]) -> float:
        """Train a step without sleep; return the largest error of its loss and gradients. Raise if it is too large."""
        task, contender = self.tasks[name], self.contenders[name]
        seconds, task.nap.seconds = task.nap.seconds, 0.0
        loss = contender.step(task.batch, task.target)
        task.nap.seconds = seconds
        wanted_loss, wanted = expected
        found = contender.gradients()
        errors = [abs(float(loss) - wanted_loss) / abs(wanted_loss)] if loss is not None else []
        errors += [float((found[k] - wanted[k]).abs().max() / wanted[k].abs().max()) for k in found]
        contender.forget()
        everyone = self._gather((max(errors), len(found), loss is not None))
        worst, count = max(error for error, _, _ in everyone), sum(count for _, count, _ in everyone)
        is_whole = count >= len(wanted) and any(has_loss for _, _, has_loss in everyone)
        if not worst < TOLERANCE or not is_whole:
            raise ArithmeticError(f"off the plain model by {worst:.2g}; gradients: {count} of {len(wanted)}")
        return worst

    def _peaks(self, task: Task) -> list[int]:
        """Return the peak of the bytes that each lane held."""
        assert task.counts is not None
        return [max(peaks) for peaks in zip(*self._gather([c.peak_bytes for c in task.counts]), strict=True)]

    def _nap(self) -> float:
        """Return the mean time of many naps, while all lanes sleep at once."""
        nap, count = next(iter(self.tasks.values())).nap, 20
        if not nap.seconds:
            return 0.0
        self._meet()
        lanes = [Thread(target=lambda: [nap() for _ in range(count)]) for _ in range(self._lanes_here)]
        begin = time.perf_counter()
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        everyone = self._gather((time.perf_counter() - begin) / count)
        return sum(everyone) / len(everyone)

    @property
    def _lanes_here(self) -> int:
        return self.job.case.lanes if self.world == 1 else 1

    def _predict(self) -> float:
        """Return the predicted step time, from costs measured now in all processes at once."""
        from ours import Ours, hand_over_seconds, predict, runtime_seconds

        case = self.job.case
        task, empty = make(case), replace(case, model="linear", nap_seconds=0.0)
        if self.empty is None:
            self.empty = Ours(empty, make(empty))
        self._meet()
        latency = self._gather(hand_over_seconds(self.contenders["ours"].pipe, task))[0]
        self._meet()
        added = self._gather(runtime_seconds(self.empty, make(empty)))
        self._meet()
        return predict(case, task, latency, statistics.median(added))

    def _time(self, name: str) -> tuple[float, float]:
        """Return the seconds of a step, from the common start to the end of the last process, and all CPU seconds."""
        task, contender = self.tasks[name], self.contenders[name]
        self._meet()
        begin = self._start()
        cpu = time.process_time()
        contender.step(task.batch, task.target)
        end, cpu = time.perf_counter(), time.process_time() - cpu
        contender.forget()
        everyone = self._gather((end, cpu))
        return max(end for end, _ in everyone) - begin, sum(cpu for _, cpu in everyone)

    def _start(self) -> float:
        """Wait for a common start and return its time; all processes share the clock of the machine."""
        if self.world == 1:
            return time.perf_counter()
        at = self.torch.tensor([time.perf_counter() + 0.01], dtype=self.torch.float64)
        self.dist.broadcast(at, src=0)
        time.sleep(max(0.0, float(at) - time.perf_counter() - 0.001))
        while time.perf_counter() < float(at):
            pass
        return float(at)

    def _gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [value] * self.world
        if self.world > 1:
            self.dist.all_gather_object(everyone, value)
        return everyone

    def _meet(self) -> None:
        if self.world > 1:
            self.dist.barrier()


class Plain:
    """The whole model in every process, without a pipeline, so that all cores are busy."""

    def __init__(self, task: Task, micro_batches: int) -> None:
        self.task, self.micro_batches = task, micro_batches

    def step(self, batch: Any, target: Any) -> Any:  # noqa: ARG002
        return self.task.plain(self.micro_batches)

    def gradients(self) -> dict[str, Any]:
        return self.task.gradients()

    def forget(self) -> None:
        forget(self.task.stages)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    from contest import run as run_as_module  # so that pickled classes have the same module name on both sides

    Path(sys.argv[2]).write_bytes(pickle.dumps(run_as_module(pickle.loads(Path(sys.argv[1]).read_bytes()))))
