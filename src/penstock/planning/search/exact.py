"""Exact solver: find the shortest schedule of a small problem with OR-Tools CP-SAT, and prove that none is shorter.

The solver runs in a child process (`exact_worker`). `exact_model` builds its input and interprets its answer.
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

MAX_ACTIONS = 2000  # the largest problems known to be proved within a minute have about 1,500
_GRACE_SECONDS = 20.0  # for the child process to start, build its model and stop


def solve_exactly(
    problem: Problem,
    *,
    hint: Draft | None,
    objective: Objective = "step",
    time_limit_seconds: float = 60.0,
    workers: int = 2,
) -> Proof:
    """Return the shortest schedule found within a time limit, never longer than the hint, and a proven lower bound.

    The hint is a schedule to start from; a good one shortens the search. Starting the solver takes about one second
    more than the limit.

    Raises:
        SolverError: if the solver is missing, fails or finds nothing, or if the problem is too large.
        UsageError: if an argument is invalid.
    """
    _check(problem, time_limit_seconds, workers)
    model = ExactModel(problem, hint, objective)
    answer = _solve(model.shop(time_limit_seconds, workers), time_limit_seconds)
    return model.proof(answer)


def _check(problem: Problem, time_limit_seconds: float, workers: int) -> None:
    faults = []
    if not isinstance(time_limit_seconds, (int, float)) or not 0 < time_limit_seconds < math.inf:
        faults.append(f"time_limit_seconds: {time_limit_seconds} must be finite and above 0")
    if workers < 1:
        faults.append(f"workers: {workers} must be 1 or more")
    if problem.order is not None:
        faults.append("the problem has a fixed order, but the exact solver chooses the order: leave it out")
    if idle := sorted(set(range(problem.num_lanes)) - set(problem.lane_of)):
        faults.append(f"lanes without a stage: {idle}")
    if faults:
        raise UsageError("; ".join(faults))
    check_size(len(kinds_of(problem)) * len(problem.lane_of) * problem.num_mbs)


def check_size(num_actions: int) -> None:
    """Refuse a problem that is too large for the solver with a SolverError."""
    if num_actions > MAX_ACTIONS:
        raise SolverError(
            f"the problem is too large for the exact solver; actions: {num_actions}, at most: {MAX_ACTIONS}; "
            "use fewer micro-batches or stages, or do without a proof"
        )


def _solve(shop: Shop, time_limit_seconds: float) -> Answer:
    """Solve a shop in a child process; raise a SolverError if the process does not answer."""
    limit = time_limit_seconds + _GRACE_SECONDS
    try:
        exit_code, out, stderr = _run_worker(json.dumps(shop), limit)
        answer: Answer = json.loads(out)
    except subprocess.TimeoutExpired as error:
        raise SolverError(f"the exact solver did not stop within {limit:.0f} s; use fewer micro-batches") from error
    except OSError as error:
        raise SolverError(f"the process of the exact solver did not start: {error}") from error
    except ValueError as error:
        last = (stderr.strip().splitlines() or ["nothing"])[-1]
        raise SolverError(
            f"the process of the exact solver ended without an answer; exit code: {exit_code}, its output: {last}; "
            "use fewer micro-batches or workers, since it may have run out of memory"
        ) from error
    if answer["status"] == "missing":
        raise SolverError(f"the exact solver needs OR-Tools: pip install 'penstock[exact]' ({answer['message']})")
    if answer["status"] == "invalid":
        raise SolverError(f"the exact solver rejects the model: {answer['message']}")
    return answer


def _run_worker(text: str, limit_seconds: float) -> tuple[int, str, str]:
    """Run the worker on a text; return its exit code, stdout and stderr."""
    # run the file, not the module: the child then imports nothing of Penstock
    command = [sys.executable, "-P", exact_worker.__file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:  # noqa: S603 - our own
        try:
            out, stderr = child.communicate(text, timeout=limit_seconds)
        except BaseException:  # a timeout or Ctrl-C: the child must not outlive the call
            child.kill()
            child.wait()
            raise
    return child.returncode, out, stderr
