"""Request scheduler: which request runs next, in which group; when a waiting request may start.

It is pure logic: numbers of requests in, jobs out. The first lane asks it for a job whenever it is free.

A group is a batch of requests that go around the lanes together. With as many groups in flight as there are lanes, each
lane works on one group while the other lanes work on the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import UsageError
from penstock.infer.generation.generation_job import Job, JobKind
from penstock.report.units import show_bytes


@dataclass
class Request:
    """One request, and how far it is.

    Args:
        number: its number, in the order of the prompts.
        num_cached: the largest number of tokens that its cache will hold.
        max_new_tokens: the largest number of tokens to generate.
    """

    number: int
    num_cached: int
    max_new_tokens: int
    group: int = -1
    num_new: int = 0
    has_ended: bool = False
    last_token: int = -1


@dataclass(frozen=True)
class LayerMemory:
    """The memory of the keys and values of one decoder layer.

    Args:
        token_bytes: the bytes of one token.
        window: the window of the layer; 0 if it has none.
        lane: the lane of the layer.
    """

    token_bytes: int
    window: int
    lane: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that keys and values need on each lane, and its limits.

    Args:
        layers: the memory of each layer.
        limits: the bytes of each lane.
        spare_tokens: the tokens that the memory of a window has in addition.
    """

    layers: Sequence[LayerMemory]
    limits: Sequence[float]
    spare_tokens: int

    def needed(self, groups: Sequence[tuple[int, int]]) -> list[int]:
        """Return the bytes of each lane for groups, each with a number of rows and of tokens.

        When a request joins a group, one layer after another is in memory twice. So the largest layer counts twice.

        >>> plan = MemoryPlan([LayerMemory(8, 0, 0), LayerMemory(8, 5, 1)], [1e9, 1e9], 2)
        >>> plan.needed([(2, 10), (1, 4)])  # the window keeps 4 tokens, and has room for 2 more
        [352, 224]
        """
        found, largest = [0] * len(self.limits), [0] * len(self.limits)
        for rows, tokens in groups:
            for layer in self.layers:
                kept = tokens if layer.window == 0 else min(tokens, layer.window - 1 + self.spare_tokens)
                num_bytes = rows * kept * layer.token_bytes
                found[layer.lane] += num_bytes
                largest[layer.lane] = max(largest[layer.lane], num_bytes)
        return [total + extra for total, extra in zip(found, largest, strict=True)]

    def fits(self, groups: Sequence[tuple[int, int]]) -> bool:
        """Return whether groups fit into the memory of all lanes."""
        return all(need <= limit for need, limit in zip(self.needed(groups), self.limits, strict=True))

    def check(self, request: Request) -> None:
        """Raise a UsageError if a request does not fit even alone."""
        if not self.fits([(1, request.num_cached)]):
            need = max(self.needed([(1, request.num_cached)]))
            raise UsageError(
                f"memory_limit: request {request.number} needs {show_bytes(need)} on a lane for the keys and values of "
                f"{request.num_cached} tokens, and the limit is {show_bytes(min(self.limits))}; "
                "raise memory_limit, or lower max_new_tokens"
            )


@dataclass
class RequestScheduler:
    """Decides which job comes next.

    Args:
        num_groups: the number of groups; 0 makes each request a group of its own.
        max_requests: the largest number of requests in flight.
        memory: the memory of the lanes; None if it has no limit.
        lane_threads: the threads of a lane while other lanes work too.
        all_threads: the threads of a lane while the other lanes wait.
    """

    num_groups: int
    max_requests: int
    memory: MemoryPlan | None = None
    lane_threads: int = 1
    all_threads: int = 1
    _waiting: deque[Request] = field(default_factory=deque)
    _requests: dict[int, Request] = field(default_factory=dict)  # in flight
    _ready: dict[int, None] = field(default_factory=dict)  # have a token that was not run yet, the oldest first
    _busy: set[int] = field(default_factory=set)  # groups with a job in flight
    _ended: list[int] = field(default_factory=list)  # ended since the last job
    _num_prefills: int = 0
    _next_groups: int | None = None

    def add(self, request: Request) -> None:
        """Add a request that waits."""
        if self.memory is not None:
            self.memory.check(request)
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or is in flight."""
        return bool(self._waiting or self._requests)

    @property
    def num_in_flight(self) -> int:
        """The number of requests in flight."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @property
    def num_rounds_left(self) -> int:
        """The largest number of tokens that a request in flight may still get."""
        return max((request.max_new_tokens - request.num_new for request in self._requests.values()), default=0)

    @property
    def is_steady(self) -> bool:
        """Whether all requests in flight decode, and no group is about to change."""
        is_waiting = bool(self._waiting) and self._admissible() is not None
        return not self._num_prefills and not is_waiting and self._next_groups is None

    @property
    def is_unbalanced(self) -> bool:
        """Whether one group has two requests more than another."""
        members = [request.group for request in self._requests.values()]
        sizes = [members.count(group) for group in range(self.num_groups)]
        return bool(sizes) and max(sizes) - min(sizes) > 1

    def may_regroup(self, num_groups: int) -> bool:
        """Return whether the memory holds the groups of now and the new ones at the same time."""
        if self.memory is None:
            return True
        tokens = [request.num_cached for request in self._requests.values()]
        new = [tokens[group::num_groups] for group in range(min(num_groups, len(tokens)))]
        return self.memory.fits([*self._sizes(), *((len(rows), max(rows)) for rows in new)])

    def regroup(self, num_groups: int) -> None:
        """Divide the requests into a number of groups, as soon as no group has a job in flight."""
        self._next_groups = num_groups

    # ---- the next job

    def next_job(self) -> tuple[Job, list[int]] | None:
        """Return a job and its last tokens (none for a prompt); None if the first lane must wait for tokens."""
        group = self._admissible()
        if group is not None:
            return self._prefill(group), []
        if self._next_groups is not None:
            if self._busy:
                return None
            self._regroup(self._next_groups)
        for number in dict.fromkeys(self._requests[ready].group for ready in self._ready):
            if number not in self._busy:
                rows = [r for r in self._requests.values() if r.group == number and r.number in self._ready]
                return self._decode(number, rows), [row.last_token for row in rows]
        return None

    def _admissible(self) -> int | None:
        """Return the group for the first waiting request; None if it must wait."""
        if not self._waiting or len(self._requests) >= self.max_requests:
            return None
        group = self._smallest_group()
        request = self._waiting[0]
        if self.memory is not None and not self.memory.fits(self._sizes((group, request.num_cached))):
            return None
        return group

    def _smallest_group(self) -> int:
        if self.num_groups == 0:
            return self._waiting[0].number
        members = [request.group for request in self._requests.values()]
        return min(range(self.num_groups), key=members.count)

    def _sizes(self, *more: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the rows and the tokens of each group, also with more requests, each with its group and its tokens."""
        found: dict[int, list[int]] = {}
        members = [(request.group, request.num_cached) for request in self._requests.values()]
        for group, num_cached in (*members, *more):
            found.setdefault(group, []).append(num_cached)
        return [(len(tokens), max(tokens)) for tokens in found.values()]

    def _prefill(self, group: int) -> Job:
        request = self._waiting.popleft()
        request.group = group
        is_alone = not self._requests and not self._waiting
        self._requests[request.number] = request
        self._num_prefills += 1
        threads = self.all_threads if is_alone else self.lane_threads
        return Job(JobKind.PREFILL, -1, (request.number,), self._take_ended(), 0, threads)

    def _decode(self, group: int, rows: Sequence[Request]) -> Job:
        numbers = tuple(row.number for row in rows)
        for number in numbers:
            del self._ready[number]
        self._busy.add(group)
        is_alone = len(numbers) == len(self._requests)
        threads = self.all_threads if is_alone else self.lane_threads
        capacity = max(row.num_cached for row in rows)
        return Job(JobKind.DECODE, group, numbers, self._take_ended(), capacity, threads)

    def _take_ended(self) -> tuple[int, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def _regroup(self, num_groups: int) -> None:
        self.num_groups, self._next_groups = num_groups, None
        for at, request in enumerate(self._requests.values()):
            request.group = at % num_groups

    # ---- the tokens that come back

    def take(self, job: Job, tokens: Sequence[int], stop_tokens: Sequence[int]) -> list[Request]:
        """Take the new tokens of a job; return its requests, of which some may have ended."""
        self._busy.discard(job.group)
        self._num_prefills -= job.kind == JobKind.PREFILL
        found = [self._requests[number] for number in job.rows]
        for request, token in zip(found, tokens, strict=True):
            request.last_token, request.num_new = token, request.num_new + 1
            request.has_ended = token in stop_tokens or request.num_new >= request.max_new_tokens
            if request.has_ended:
                del self._requests[request.number]
                self._ended.append(request.number)
            else:
                self._ready[request.number] = None
        return found
