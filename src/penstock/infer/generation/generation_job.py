"""Generation job: what the first lane asks all lanes to do next, as data and as a tensor of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

_ALIGN = 16  # the numbers are padded, so that messages have few different shapes
_NUM_COUNTS = 7  # the numbers before the rows


class JobKind(IntEnum):
    """The kinds of jobs."""

    PREFILL = 0  # run the prompt of one request
    DECODE = 1  # run one more token of each request of a group
    PROBE = 2  # run one token, and report the memory of its keys and values
    STOP = 3  # end


@dataclass(frozen=True)
class Job:
    """One pass through all lanes.

    Args:
        kind: what to do.
        group: the group whose requests run; -1 if there is none.
        rows: the numbers of the requests, in the order of the rows of the batch.
        ended: requests whose keys and values can be freed first.
        capacity: the largest number of tokens that a row will have in the cache.
        num_threads: the number of threads that each lane may use.
    """

    kind: JobKind
    group: int = -1
    rows: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    capacity: int = 0
    num_threads: int = 1

    def to_numbers(self, form: tuple[int, ...]) -> torch.Tensor:
        """Return the job, and the form of the values that travel with it, as one tensor of numbers."""
        counts = [self.kind, self.group, self.capacity, self.num_threads, len(self.rows), len(self.ended), len(form)]
        numbers = [*counts, *self.rows, *self.ended, *form]
        numbers += [0] * (-len(numbers) % _ALIGN)
        return torch.tensor(numbers, dtype=torch.int64)

    @classmethod
    def from_numbers(cls, numbers: torch.Tensor) -> tuple[Job, tuple[int, ...]]:
        """Return the job and the form that `to_numbers` wrote.

        >>> job = Job(JobKind.DECODE, 1, (3, 5), (4,), 20, 2)
        >>> Job.from_numbers(job.to_numbers((1, 0))) == (job, (1, 0))
        True
        """
        listed = numbers.tolist()
        kind, group, capacity, num_threads, num_rows, num_ended, num_form = listed[:_NUM_COUNTS]
        ends = [_NUM_COUNTS, _NUM_COUNTS + num_rows, _NUM_COUNTS + num_rows + num_ended]
        rows, ended = tuple(listed[ends[0] : ends[1]]), tuple(listed[ends[1] : ends[2]])
        form = tuple(listed[ends[2] : ends[2] + num_form])
        return cls(JobKind(kind), group, rows, ended, capacity, num_threads), form


@dataclass(frozen=True)
class Token:
    """One new token of a request.

    Args:
        request: the number of the request: its place among the prompts.
        token: the token.
        is_last: whether the request ends with it.
    """

    request: int
    token: int
    is_last: bool
