"""The scheduler keeps all lanes busy, lets requests join and leave, and never exceeds the memory."""

import pytest

from penstock.errors import UsageError
from penstock.infer.generation.generation_job import JobKind
from penstock.infer.generation.request_scheduler import LayerMemory, MemoryPlan, Request, RequestScheduler


def scheduler(count, *, tokens=4, **options):
    made = RequestScheduler(**{"num_groups": 2, "max_requests": 16, **options})
    for number in range(count):
        made.add(Request(number, 10 + tokens, tokens))
    return made


def jobs_in_flight(made):
    """Return the jobs that can start before a token comes back."""
    found = []
    while (job := made.next_job()) is not None:
        found.append(job[0])
    return found


def run(made, *, stop=(), token=5):
    """Run all requests; return all jobs, and the number of jobs in flight at each time."""
    jobs, waiting, depths = [], [], []
    while made.has_work:
        waiting += jobs_in_flight(made)
        depths.append(len(waiting))
        job = waiting.pop(0)
        jobs.append(job)
        made.take(job, [token] * len(job.rows), stop)
    return jobs, depths


def test_as_many_groups_as_lanes_are_in_flight():
    made = scheduler(4)
    prefills = jobs_in_flight(made)
    assert [job.kind for job in prefills] == [JobKind.PREFILL] * 4
    for job in prefills:
        made.take(job, [1], ())
    decodes = jobs_in_flight(made)
    assert [job.rows for job in decodes] == [(0, 2), (1, 3)]
    assert jobs_in_flight(made) == []
    made.take(decodes[0], [7, 8], ())
    (again, tokens) = made.next_job()
    assert (again.rows, tokens) == ((0, 2), [7, 8])


def test_each_request_gets_its_number_of_tokens():
    jobs, depths = run(scheduler(5, tokens=6))
    assert all(sum(number in job.rows for job in jobs) == 6 for number in range(5))
    assert max(depths) == 5


def test_ended_requests_are_named_once_and_leave():
    jobs, _ = run(scheduler(3, tokens=3, max_requests=1))
    ended = [number for job in jobs for number in job.ended]
    assert ended == [0, 1]  # after the last one there is no job any more
    assert all(len(job.rows) == 1 for job in jobs)


def test_a_stop_token_ends_a_request():
    jobs, _ = run(scheduler(2, tokens=9), stop=(5,))
    assert [job.kind for job in jobs] == [JobKind.PREFILL] * 2


def test_a_request_waits_until_it_fits():
    plan = MemoryPlan([LayerMemory(1, 0, 0)], [45.0], 0)
    made = scheduler(3, memory=plan)  # 14 tokens each; a group of two needs 28, and as many again while one joins
    first = jobs_in_flight(made)
    assert len(first) == 2
    made.take(first[0], [1], (1,))
    assert [job.rows for job in jobs_in_flight(made)] == [(2,)]
    with pytest.raises(UsageError, match="request 9 needs 60 B"):
        made.add(Request(9, 30, 1))


def test_groups_are_divided_again_when_none_is_in_flight():
    made = scheduler(4)
    for job in jobs_in_flight(made):
        made.take(job, [1], ())
    first, second = jobs_in_flight(made)
    made.regroup(1)
    made.take(first, [1, 1], ())
    assert made.next_job() is None
    made.take(second, [1, 1], ())
    job, _ = made.next_job()
    assert job.rows == (0, 1, 2, 3)


def test_unbalanced_groups_are_noticed():
    made = scheduler(4)
    for job in jobs_in_flight(made):
        made.take(job, [5 if job.rows[0] in (1, 3) else 1], (5,))
    assert made.is_unbalanced
    made.regroup(2)
    assert [job.rows for job in jobs_in_flight(made)] == [(0,), (2,)]
    assert not made.is_unbalanced


def test_a_single_job_may_use_all_threads():
    made = scheduler(4, num_groups=1, lane_threads=1, all_threads=2)
    for job in jobs_in_flight(made):
        made.take(job, [1], ())
    assert [job.num_threads for job in jobs_in_flight(made)] == [2]
    made = scheduler(4, num_groups=2, lane_threads=1, all_threads=2)
    for job in jobs_in_flight(made):
        made.take(job, [1], ())
    assert [job.num_threads for job in jobs_in_flight(made)] == [1, 1]
