"""First lane: runs its part of each job, sends it on, and takes the tokens that come back from the last lane."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from penstock.infer.generation.generation_job import Job, JobKind, Token
from penstock.infer.generation.group_choice import GroupChoice
from penstock.infer.generation.lane_links import Links
from penstock.infer.generation.lane_values import Values
from penstock.infer.generation.request_scheduler import Request, RequestScheduler

if TYPE_CHECKING:
    from penstock.infer.generation.generation_lane import GenerationLane


class FirstLane:
    """The loop of the first lane.

    Args:
        lane: the first lane.
        links: its links; None if there is only one lane.
        prompts: the prompts, read one at a time.
        device: where the lane runs.
    """

    def __init__(
        self, lane: GenerationLane, links: Links | None, prompts: Iterator[torch.Tensor], device: torch.device
    ) -> None:
        self._lane, self._links, self._device = lane, links, device
        self._prompts, self._num_read, self._has_more = prompts, 0, True
        self._tokens: dict[int, torch.Tensor] = {}  # the prompts that wait
        self._done: deque[Values] = deque()  # results, if there is only one lane
        self._in_flight: deque[Job] = deque()
        self._round: tuple[int, int, float] | None = None  # group, requests in flight, start

    def probe(self) -> list[list[int]]:
        """Return a row for each decoder layer: the bytes of one token, the window, the first layer of its lane."""
        threads = torch.get_num_threads()
        self._run(Job(JobKind.PROBE, rows=(-1,), num_threads=threads), torch.zeros((1, 1), dtype=torch.int64))
        figures: list[list[int]] = self._receive().tokens.tolist()
        return figures

    def stop(self) -> None:
        """End the other lanes: send a last job, and wait until it comes back behind the jobs in flight."""
        if self._links is None:
            return
        self._links.send(Job(JobKind.STOP), Values(torch.zeros((1, 1), dtype=torch.int64)))
        while self._links.receive()[0].kind != JobKind.STOP:
            pass

    def generate(
        self, scheduler: RequestScheduler, make_request: Callable[[int, int], Request], stop_tokens_of: tuple[int, ...],
        choice: GroupChoice | None,
    ) -> Iterator[Token]:  # fmt: skip
        """Yield the tokens of all requests, each as soon as it comes back.

        Args:
            scheduler: decides which job comes next.
            make_request: makes a request from its number and the length of its prompt.
            stop_tokens_of: the tokens after which a request ends.
            choice: chooses the number of groups; None leaves that of the scheduler.
        """
        while True:
            self._read(scheduler, make_request)
            if not scheduler.has_work:
                return
            found = scheduler.next_job()
            if found is not None:
                job, last_tokens = found
                prompt = self._tokens.pop(job.rows[0]) if job.kind == JobKind.PREFILL else None
                tokens = torch.tensor(last_tokens)[:, None] if prompt is None else prompt[None]
                self._run(job, tokens)
                continue
            job = self._in_flight.popleft()
            new = self._receive().tokens.tolist()
            requests = scheduler.take(job, new, stop_tokens_of)
            if choice is not None:
                self._measure(job, scheduler, choice)
            yield from (Token(r.number, token, r.has_ended) for r, token in zip(requests, new, strict=True))

    def _read(self, scheduler: RequestScheduler, make_request: Callable[[int, int], Request]) -> None:
        """Read prompts until one waits."""
        while self._has_more and not scheduler.num_waiting:
            prompt = next(self._prompts, None)
            if prompt is None:
                self._has_more = False
                return
            self._tokens[self._num_read] = prompt
            scheduler.add(make_request(self._num_read, len(prompt)))
            self._num_read += 1

    def _run(self, job: Job, tokens: torch.Tensor) -> None:
        values = self._lane.run(job, Values(tokens.to(self._device)))
        if job.kind != JobKind.PROBE:
            self._in_flight.append(job)
        if self._links is None:
            self._done.append(values)
        else:
            self._links.send(job, values)

    def _receive(self) -> Values:
        return self._done.popleft() if self._links is None else self._links.receive()[1]

    def _measure(self, job: Job, scheduler: RequestScheduler, choice: GroupChoice) -> None:
        """Measure rounds: from the tokens of one group to its next tokens, while no request joins or leaves."""
        if job.kind != JobKind.DECODE or not scheduler.is_steady or not scheduler.num_in_flight:
            self._round = None
            return
        now, count = time.perf_counter(), scheduler.num_in_flight
        if self._round is None or self._round[1] != count:
            self._round = (job.group, count, now)
            if scheduler.is_unbalanced:
                self._regroup(scheduler, scheduler.num_groups, choice)
            return
        if self._round[0] != job.group:
            return
        choice.note(count, scheduler.num_groups, now - self._round[2])
        self._round = (job.group, count, now)
        best = choice.best(count, scheduler.num_rounds_left)
        if best not in (None, scheduler.num_groups):
            self._regroup(scheduler, best, choice)

    def _regroup(self, scheduler: RequestScheduler, num_groups: int, choice: GroupChoice) -> None:
        if scheduler.may_regroup(num_groups):
            scheduler.regroup(num_groups)
            choice.restart()
            self._round = None
