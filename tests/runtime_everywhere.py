"""Everywhere: one test body, run with lanes that are threads and with lanes that are processes."""

from __future__ import annotations

import contextlib
import pickle
import traceback
import uuid
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import penstock
import processes
from penstock.model.capture.capture import capture
from penstock.schedule.schedule import Schedule
from pipelines import cuts_of

_SECONDS = 60
_GROUPS: dict[int, Group] = {}


def pipeline(model, example, *, schedule="1f1b", lanes=2, micro_batches=4, path="auto", **options):
    """Return a pipeline that is cut at even places: nothing is measured."""
    if not isinstance(schedule, Schedule):
        schedule = penstock.schedules.build(schedule, lanes=lanes, micro_batches=micro_batches)
    captured = capture(model, example, training=True, path=path, num_stages=schedule.num_stages)
    options = {"cuts": cuts_of(captured.graph, schedule.num_stages), "timeout": 20, **options}
    return penstock.Pipeline(captured, example=example, schedule=schedule, capture_path=path, **options)


def together():
    """Wait for the other processes, where there are any."""
    if dist.is_initialized():
        dist.barrier()


def everyone(thing):
    """Return what each process gave; what this one gave where lanes are threads."""
    if not dist.is_initialized():
        return [thing]
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def everywhere(body=None, *, count=2):
    """Turn a body into a test that runs in threads, and in so many processes."""
    if body is None:
        return lambda function: everywhere(function, count=count)
    places = ["threads", "processes"]

    @pytest.mark.parametrize("where", places)
    def test(where):
        if where == "threads":
            body()
        else:
            in_processes(test, count)

    test.body = body
    test.__name__, test.__doc__, test.__module__, test.__qualname__ = (
        body.__name__, body.__doc__, body.__module__, body.__qualname__,
    )  # fmt: skip
    return test


def in_processes(test, count):
    """Run a test's body in the group of so many processes, which is started once; raise what they raise."""
    if count not in _GROUPS:
        _GROUPS[count] = Group(count)
    try:
        _GROUPS[count].run(test)
    except BaseException:
        _GROUPS.pop(count).end()  # they may be apart in what they do
        raise


class Group:
    """Processes that wait for functions to run."""

    def __init__(self, count):
        self._name, self._count, self._number = uuid.uuid4().hex, count, 0
        self._store = processes.store()
        self._started = processes.start(serve, count, self._name, self._store.port)

    def run(self, function):
        """Run a function in all of them."""
        self._number += 1
        name = f"{self._name}/{self._number}"
        self._store.set(name, pickle.dumps(function))
        answers = [f"{name}/{rank}" for rank in range(self._count)]
        try:
            self._store.wait(answers, timedelta(seconds=_SECONDS))
        except dist.DistStoreError:
            answers = [answer for answer in answers if self._store.check([answer])]
        told = [self._store.get(answer).decode() for answer in answers]
        assert len(told) == self._count, "no answer in time; what others said: " + "\n".join(told)
        assert not any(told), "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(told) if text)

    def end(self):
        """End the processes."""
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()


def serve(name, port):
    """Run what the test process asks for, until it ends."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    number = 0
    while True:
        number += 1
        at = f"{name}/{number}"
        while True:
            with contextlib.suppress(dist.DistStoreError):
                store.wait([at], timedelta(seconds=30))
                break
        torch.manual_seed(0)
        text = ""
        try:
            pickle.loads(store.get(at)).body()
        except BaseException:
            text = traceback.format_exc()
        store.set(f"{at}/{dist.get_rank()}", text)
