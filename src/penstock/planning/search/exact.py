"""Exact: find the shortest schedule of a small problem and prove that none is shorter, with OR-Tools' CP-SAT.

The solver runs in a child process (`exact_worker`); what it is asked, and what its answer proves, is in
`exact_model`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

from penstock.errors import SolverError, UsageError
from penstock.planning.search import exact_worker
from penstock.planning.search.exact_model import ExactModel, Proof, kinds_of
from penstock.planning.search.exact_worker import Answer, Shop
from penstock.planning.search.greedy import Draft, Objective, Problem

__all__ = ["MAX_ACTIONS", "Proof", "check_size", "solve_exactly"]

MAX_ACTIONS = 2000  # the largest that a minute is known to prove have some 1,500
_GRACE_SECONDS = 20.0  # for the child to start, build its model and stop


def solve_exactly(
    problem: Problem,
    *,
    hint: Draft | None,
    objective: Objective = "step",
    time_limit_seconds: float = 60.0,
    workers: int = 2,
) -> Proof:
    """Return the shortest schedule found in a time limit, never longer than the hint, and a proven bound.

    Args:
        problem: what to schedule; without a fixed order.
        hint: where to start; a good one shortens the search.
        objective: what to shorten.
        time_limit_seconds: for the solver itself; starting it takes a second more.
        workers: threads of the solver.

    Raises:
        SolverError: when the solver is missing, fails or finds nothing, or the problem is too big for it.
        UsageError: when an argument cannot be right.
    """
    _check(problem, time_limit_seconds, workers)
    model = ExactModel(problem, hint, objective)
    answer = _ask(model.shop(time_limit_seconds, workers), time_limit_seconds)
    return model.proof(answer)


def _check(problem: Problem, time_limit_seconds: float, workers: int) -> None:
    faults = []
    if not isinstance(time_limit_seconds, (int, float)) or not 0 < time_limit_seconds < math.inf:
        faults.append(f"time_limit_seconds: {time_limit_seconds} must be finite and more than 0")
    if workers < 1:
        faults.append(f"workers: {workers} must be 1 or more")
    if problem.order is not None:
        faults.append("the problem fixes an order, which the exact solver is there to choose: leave it out")
    if idle := sorted(set(range(problem.num_lanes)) - set(problem.lane_of)):
        faults.append(f"lanes without a stage: {idle}")
    if faults:
        raise UsageError("; ".join(faults))
    check_size(len(kinds_of(problem)) * len(problem.lane_of) * problem.num_mbs)


def check_size(num_actions: int) -> None:
    """Refuse a problem that the solver would not finish.

    Raises:
        SolverError: when it has too many actions.
    """
    if num_actions > MAX_ACTIONS:
        raise SolverError(
            f"the problem is too big for the exact solver; actions: {num_actions}, at most: {MAX_ACTIONS}; "
            "take fewer micro-batches or stages, or do without a proof"
        )


def _ask(shop: Shop, time_limit_seconds: float) -> Answer:
    """Return a child process's answer to a shop.

    Raises:
        SolverError: when the child has none.
    """
    limit = time_limit_seconds + _GRACE_SECONDS
    try:
        exit_code, out, said = _run_worker(json.dumps(shop), limit)
        answer: Answer = json.loads(out)
    except subprocess.TimeoutExpired as error:
        raise SolverError(f"the exact solver did not stop in {limit:.0f} s; take fewer micro-batches") from error
    except OSError as error:
        raise SolverError(f"the exact solver's process did not start: {error}") from error
    except ValueError as error:
        last = (said.strip().splitlines() or ["nothing"])[-1]
        raise SolverError(
            f"the exact solver's process ended without an answer; exit code: {exit_code}, it said: {last}; "
            "what helps: fewer micro-batches or workers, for it may have run out of memory"
        ) from error
    if answer["status"] == "missing":
        raise SolverError(f"the exact solver needs OR-Tools: pip install ortools ({answer['message']})")
    if answer["status"] == "invalid":
        raise SolverError(f"the exact solver refuses the model: {answer['message']}")
    return answer


def _run_worker(text: str, limit_seconds: float) -> tuple[int, str, str]:
    """Run the worker on a text; return its exit code, and what it wrote to its output and its error stream."""
    # by its file, not as a module of the package: the child needs nothing of Penstock, nor what that imports
    command = [sys.executable, "-P", exact_worker.__file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:  # noqa: S603 - our own
        try:
            out, said = child.communicate(text, timeout=limit_seconds)
        except BaseException:  # a timeout, or the user's interrupt: the child must not outlive the call
            child.kill()
            child.wait()
            raise
    return child.returncode, out, said
