"""The exact solver: optima known by hand and by brute force, bounds that hold, and failures that are told."""

import itertools
import math
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from penstock import Costs, schedules, simulate
from penstock.errors import ScheduleError, SolverError, UsageError
from penstock.planning.search import exact
from penstock.planning.search.exact import Proof, solve_exactly
from penstock.planning.search.greedy import Policy, Problem, write_schedule
from penstock.planning.search.search import polish
from penstock.schedule.peak_memory import MemoryLimit
from penstock.schedule.schedule import Schedule
from penstock.schedule.verify import verify

pytest.importorskip("ortools", reason="the exact solver is an extra")

UNIT = Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, saved_bytes=1.0, pending_bytes=1.0)


def make(lane_of, num_mbs, costs=UNIT, *, limit=math.inf, split=True):
    lanes = 1 + max(lane_of)
    return Problem("exact", tuple(lane_of), num_mbs, costs.for_stages(len(lane_of)), (limit,) * lanes, split)


def search(problem, objective="step"):
    """Return the best of a few greedy schedules, polished."""
    lanes = problem.num_lanes
    policies = itertools.product(range(1, 2 * lanes + 1), (0.0, 1.0), (0.0, 1.0))
    drafts = [write_schedule(problem, Policy((cap,) * lanes, w, f)) for cap, w, f in policies]
    best = min((draft for draft in drafts if draft), key=lambda draft: draft.length(objective))
    return polish(problem, best, objective=objective, rounds=100)


def check(proof: Proof, problem: Problem, costs: Costs) -> None:
    """The schedule runs, keeps within memory and takes what it says; the bound is not above it."""
    stage_costs = problem.costs
    limit = MemoryLimit(stage_costs.saved_bytes, stage_costs.pending_bytes, np.array(problem.limit_bytes))
    verify(proof.draft.schedule, memory=limit)
    timeline = simulate(proof.draft.schedule, costs)
    assert timeline.step_seconds == pytest.approx(proof.draft.step_seconds)
    assert max(timeline.lane_seconds) == pytest.approx(proof.draft.span_seconds)
    assert all(peak <= most * (1 + 1e-9) for peak, most in zip(timeline.peak_bytes, problem.limit_bytes, strict=True))
    assert 0 < proof.bound_seconds <= proof.draft.length(proof.objective)
    assert proof.gap >= 0


def random_costs(rng, stages, *, digits=None):
    def column(low, high):
        return [
            rng.uniform(low, high) if digits is None else round(rng.uniform(low, high), digits) for _ in range(stages)
        ]

    return Costs(
        forward=column(0.5, 1.5),
        input_grad=column(0.5, 1.5),
        weight_grad=column(0.3, 1.2),
        transfer=column(0.0, 0.2),
        saved_bytes=column(0.6, 1.0),
        pending_bytes=column(0.2, 1.0),
    )


@pytest.mark.parametrize(
    ("lanes", "num_mbs", "split", "expected"),
    [
        (1, 3, True, 9),
        (2, 2, True, 7),  # lane 1 starts at 1 and works for 6
        (4, 4, True, 15),  # lane 3 starts at 3 and works for 12
        (4, 8, True, 27),
        (2, 2, False, 9),  # 1F1B's (mbs + lanes - 1) * (F + B)
    ],
)
def test_even_stages_have_the_optimum_known_by_hand(lanes, num_mbs, split, expected):
    problem = make(range(lanes), num_mbs, split=split)
    proof = solve_exactly(problem, hint=None)
    check(proof, problem, UNIT)
    assert proof.is_optimal
    assert proof.draft.step_seconds == proof.bound_seconds == expected
    assert (proof.gap, proof.resolution_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("objective", ["step", "span"])
def test_a_tighter_limit_never_gives_a_shorter_schedule(objective):
    lengths = []
    for limit in (8, 4, 3, 2, 1):
        problem = make(range(4), 6, limit=limit)
        proof = solve_exactly(problem, hint=search(problem, objective), objective=objective)
        check(proof, problem, UNIT)
        assert proof.is_optimal
        lengths.append(proof.draft.length(objective))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


@pytest.mark.parametrize(("pending", "expected"), [(0.0, 13), (0.5, 15), (1.0, 15)])
def test_what_is_pending_counts_too(pending, expected):
    """With room for one, lane 0 starts a forward every 4 seconds; every 5 where W must have freed its share."""
    costs = replace(UNIT, pending_bytes=pending)
    problem = make(range(2), 3, costs, limit=1)
    proof = solve_exactly(problem, hint=None)
    check(proof, problem, costs)
    assert proof.is_optimal
    assert proof.draft.step_seconds == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("limit", [math.inf, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_two_lanes_are_as_good_as_brute_force(seed, limit):
    """All orders of two lanes with two micro-batches each, also those that swap micro-batches on a stage."""
    costs = random_costs(random.Random(seed), 2)
    problem = make((0, 1), 2, costs, limit=limit)
    memory = MemoryLimit(problem.costs.saved_bytes, problem.costs.pending_bytes, np.array(problem.limit_bytes))
    steps, spans = [], []
    for order in itertools.product(interleavings(0), interleavings(1)):
        schedule = Schedule.of(order)
        try:
            verify(schedule, memory=memory)
        except ScheduleError:
            continue
        timeline = simulate(schedule, costs)
        steps.append(timeline.step_seconds)
        spans.append(max(timeline.lane_seconds))
    for objective, lengths in (("step", steps), ("span", spans)):
        proof = solve_exactly(problem, hint=None, objective=objective)
        check(proof, problem, costs)
        assert proof.is_optimal
        assert proof.draft.length(objective) == pytest.approx(min(lengths), rel=1e-4)
        assert proof.bound_seconds <= min(lengths) * (1 + 1e-12)


def interleavings(stage):
    """Return every order of F, I and W of two micro-batches."""
    for places in itertools.combinations(range(6), 3):
        turns = {True: iter("FIW"), False: iter("FIW")}
        yield " ".join(f"{stage}{next(turns[place in places])}{int(place in places)}" for place in range(6))


@pytest.mark.parametrize("seed", range(6))
def test_uneven_stages_are_never_worse_than_the_search(seed):
    rng = random.Random(seed)
    lanes, num_mbs = rng.choice([(2, 4), (3, 4), (3, 5)])
    costs = random_costs(rng, lanes, digits=rng.choice([1, None]))
    problem = make(range(lanes), num_mbs, costs, limit=rng.choice([math.inf, 2.5]))
    objective = rng.choice(["step", "span"])
    found = search(problem, objective)
    proof = solve_exactly(problem, hint=found, objective=objective, time_limit_seconds=5)
    check(proof, problem, costs)
    assert proof.draft.length(objective) <= found.length(objective)
    assert proof.bound_seconds <= found.length(objective)
    assert proof.gap < 1e-3 or not proof.is_optimal


@pytest.mark.parametrize("split", [True, False])
def test_a_lane_may_own_two_stages(split):
    problem = make((0, 1, 1, 0), 4, limit=6, split=split)
    proof = solve_exactly(problem, hint=search(problem))
    check(proof, problem, UNIT)
    assert proof.is_optimal
    assert proof.draft.step_seconds >= 24  # a lane's work


def test_lanes_may_own_stages_in_a_row():
    problem = make((0, 0, 1, 1), 3)
    for objective in ("step", "span"):
        proof = solve_exactly(problem, hint=None, objective=objective)
        check(proof, problem, UNIT)
        assert proof.bound_seconds >= 18  # a lane's work


def test_actions_may_take_no_time():
    costs = replace(UNIT, weight_grad=0.0, transfer=0.5)
    problem = make(range(3), 4, costs, limit=3)
    proof = solve_exactly(problem, hint=search(problem))
    check(proof, problem, costs)
    assert proof.is_optimal


def test_a_hint_with_swapped_micro_batches_is_understood():
    problem = make((0, 1), 2)
    swapped = Schedule.of(["0F1 0F0 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W1 1W0"])
    hint = write_schedule(problem, Policy((2, 2), 0.0, 0.0))
    assert hint is not None
    times = simulate(swapped, UNIT)
    proof = solve_exactly(problem, hint=replace(hint, schedule=swapped, step_seconds=times.step_seconds))
    assert proof.draft.step_seconds == 7


def test_the_best_hint_comes_back_as_it_is():
    problem = make(range(2), 2)
    hint = solve_exactly(problem, hint=None).draft
    assert solve_exactly(problem, hint=hint).draft is hint


def test_a_hard_problem_stops_in_time_with_a_bound_that_holds():
    costs = random_costs(random.Random(1), 12)
    problem = make((0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0), 16, costs, limit=8.0)
    hint = search(problem)
    began = time.monotonic()
    proof = solve_exactly(problem, hint=hint, time_limit_seconds=0.5)
    assert time.monotonic() - began < 10
    check(proof, problem, costs)
    assert not proof.is_optimal
    assert proof.gap > 0
    assert proof.resolution_seconds > 0


def test_nothing_found_in_time_is_said():
    costs = random_costs(random.Random(1), 12)
    problem = make((0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0), 16, costs, limit=4.0)
    with pytest.raises(SolverError, match="more time, fewer micro-batches"):
        solve_exactly(problem, hint=None, time_limit_seconds=0.01)


def test_a_limit_below_one_micro_batch_is_said():
    with pytest.raises(SolverError, match="memory limit"):
        solve_exactly(make(range(2), 2, limit=0.5), hint=None)


def test_a_problem_that_is_too_big_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(SolverError, match="actions: 2304, at most: 2000"):
        solve_exactly(make(range(16), 48), hint=None)


def test_wrong_arguments_are_refused():
    problem = make(range(2), 2)
    with pytest.raises(UsageError, match=r"time_limit_seconds: 0 .*; workers: 0 "):
        solve_exactly(problem, hint=None, time_limit_seconds=0, workers=0)
    with pytest.raises(UsageError, match="order"):
        solve_exactly(replace(problem, order=()), hint=None)
    with pytest.raises(UsageError, match=r"without a stage: \[0\]"):
        solve_exactly(make((1, 2), 2), hint=None)


def test_a_hint_of_another_problem_is_refused():
    hint = search(make(range(2), 3))
    with pytest.raises(UsageError, match="actions of the hint are not those"):
        solve_exactly(make(range(2), 4), hint=hint)
    with pytest.raises(UsageError, match="needs more memory"):
        solve_exactly(make(range(2), 3, limit=1), hint=hint)
    stuck = replace(hint, schedule=Schedule.of(["0I0 0F0 0W0", "1F0 1I0 1W0"]))
    with pytest.raises(UsageError, match="deadlocks"):
        solve_exactly(make(range(2), 1), hint=stuck)


@pytest.fixture
def fake_ortools(tmp_path, monkeypatch):
    """Return a function that puts another OR-Tools before the real one, in the child."""

    def fake(code):
        (tmp_path / "ortools").mkdir()
        (tmp_path / "ortools" / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return fake


def test_a_missing_solver_says_what_to_install(fake_ortools):
    fake_ortools("raise ModuleNotFoundError('No module named ortools')")
    with pytest.raises(SolverError, match=r"pip install 'penstock\[exact\]'"):
        solve_exactly(make(range(2), 2), hint=None)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code: -9"),
        ("raise RuntimeError('out of luck')", "out of luck"),
        ("import os; os._exit(0)", "without an answer"),
        ("import os; print('half of an ans', flush=True); os._exit(0)", "without an answer"),
    ],
)
def test_a_solver_that_dies_is_told_and_harms_nobody(fake_ortools, code, message):
    fake_ortools(code)
    with pytest.raises(SolverError, match=message):
        solve_exactly(make(range(2), 2), hint=search(make(range(2), 2)))


def test_a_solver_that_does_not_stop_is_killed(fake_ortools, monkeypatch):
    fake_ortools("import time; time.sleep(60)")
    monkeypatch.setattr(exact, "_GRACE_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(SolverError, match="did not stop"):
        solve_exactly(make(range(2), 2), hint=None, time_limit_seconds=0.5)
    assert time.monotonic() - began < 10


def test_an_interrupt_kills_the_solver_too(fake_ortools, tmp_path):
    pid = tmp_path / "pid"
    fake_ortools(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        solve_exactly(make(range(2), 2), hint=None)
    timer.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_process_that_cannot_start_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(SolverError, match="did not start"):
        solve_exactly(make(range(2), 2), hint=None)


def test_ortools_stays_out_of_this_process():
    solve_exactly(make(range(2), 2), hint=None)
    assert not any(name.startswith("ortools.sat") for name in sys.modules)


def test_prove_refuses_what_is_too_big_before_it_searches():
    with pytest.raises(SolverError, match="too large"):
        schedules.prove(lanes=64, micro_batches=1024)


def test_prove_where_auto_would_overlap_forwards_and_backwards():
    """The story: the schedule that auto made was handed to the solver, which does not know such pairs."""
    costs = Costs(forward=1.0, backward=2.0, overlapped=1.6)
    proof = schedules.prove(lanes=2, micro_batches=3, stages_per_lane=2, costs=costs, time_limit_seconds=10)
    assert proof.bound_seconds <= proof.draft.step_seconds
