"""How much time does the runtime add to a schedule? Compare Penstock, other libraries and a hand-written loop.

    .venv/bin/python benchmarks/runtime/run.py [sleeping] [compute] [actions] [memory] [prediction] [recording]
        [--quick]

By default, all sections run. Figures are medians; brackets show the lowest and the highest round. Every contender first
trains one step; its loss and gradients must be those of the plain model. The script writes results.csv and results.md
and keeps the sections there that it did not run. To include the other libraries from PyPI, first run
`benchmarks/runtime/peers_env`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from contest import Job, Result, run, run_elsewhere
from table import ELSEWHERE, HEADS, Row, numbers, render, row_of, save, spread
from tasks import Case

import penstock
from penstock import Costs, schedules
from penstock.schedules import Schedule

HERE = Path(__file__).parent
PEERS = HERE / ".peers" / "bin" / "python"
OURS = ("ours", "floor", "peer")
TWO_A_LANE = ("interleaved_1f1b", "zb_v")


@dataclass(frozen=True)
class Setting:
    """How much the script runs."""

    is_quick: bool
    rounds: int
    only: tuple[str, ...]  # names of contenders; empty means all

    def pick(self, *names: str) -> tuple[str, ...]:
        return tuple(name for name in names if not self.only or name.partition(",")[0] in self.only)


def case_of(model: str, schedule: str, lanes: int, micro_batches: int, **more: object) -> Case:
    return Case(model, schedule, lanes, micro_batches, 2 if schedule in TWO_A_LANE else 1, **more)


def build(case: Case) -> Schedule:
    count = case.stages_per_lane if case.stages_per_lane > 1 else None
    return schedules.build(case.schedule, lanes=case.lanes, micro_batches=case.micro_batches, stages_per_lane=count)


def job_of(case: Case, contenders: tuple[str, ...], rounds: int, *, is_predicted: bool = False) -> Job:
    schedule = build(case)
    lanes = [[(action.kind.value, action.stage, action.mb) for action in lane] for lane in schedule.lanes]
    return Job(case, lanes, list(schedule.lane_of), contenders, rounds, is_predicted)


def equal_costs(num_stages: int, action_seconds: float, *, first_has_input: bool) -> Costs:
    """Return costs with equal F, I and W. I of the first stage is 0 unless `first_has_input`."""
    first = action_seconds if first_has_input else 0.0
    input_grad = [first] + [action_seconds] * (num_stages - 1)
    return Costs(forward=action_seconds, input_grad=input_grad, weight_grad=action_seconds)


def rows_of(section: str, case: Case, result: Result, costs: Costs | None, num_actions: int) -> Iterator[Row]:
    """Return one row per contender. Its own time is the simulated time of the order it runs, or 0 without costs."""
    ours = build(case)

    def own(name: str) -> float:
        schedule = _read(result.orders[name], case) if name in result.orders else ours
        return penstock.simulate(schedule, costs).step_seconds if costs else 0.0

    for name, times in result.seconds.items():
        yield row_of(
            section,
            case,
            name,
            own_seconds=own(name),
            seconds=numbers(times),
            cpu_seconds=numbers(result.cpu_seconds[name]),
            num_actions=num_actions,
            error=result.errors[name],
            nap_seconds=result.nap_seconds,
        )
    for name, why in result.failures.items():
        yield row_of(section, case, name, own_seconds=own(name), note=_shorten(why))


def _shorten(why: str) -> str:
    return why.strip().splitlines()[-1][:200]


def _read(lanes: list[str], case: Case) -> Schedule:
    """Return a peer's own order as a schedule; its stages are on the same lanes as Penstock's."""
    return replace(build(case), lanes=tuple(map(schedules.Lane.of, lanes)), name="peer")


def tell(case: Case, result: Result, began: float) -> None:
    """Print the result of one case while the others still have to run."""
    found = ", ".join(f"{name} {spread(times)}" for name, times in result.seconds.items())
    failed = "".join(f"; {name} failed" for name in result.failures)
    where = f"{case.lanes} {'threads' if case.threads else 'processes'}"
    size = f" {case.mib} MiB" if case.model == "sleeping" else ""
    what = f"{case.model} {case.schedule} {where}{size} × {case.micro_batches}"
    print(f"  {what}: {found}{failed}  [{time.monotonic() - began:.0f} s]", flush=True)


def contest(
    section: str, case: Case, names: tuple[str, ...], setting: Setting, costs: Costs | None, *, elsewhere: bool = False
) -> list[Row]:
    """Run contenders in a case; with `elsewhere`, use the interpreter of the peers' environment."""
    if not names or (elsewhere and not PEERS.exists()):
        return []
    began, job = time.monotonic(), job_of(case, names, setting.rounds)
    result = run_elsewhere(PEERS, job) if elsewhere else run(job)
    tell(case, result, began)
    return list(rows_of(section, case, result, costs, job.num_actions))


# Sections


def sleeping(setting: Setting) -> list[Row]:
    rows = []
    for case in sleeping_cases(setting.is_quick):
        costs = equal_costs(case.num_stages, case.nap_seconds, first_has_input=False)
        names = ["ours", "floor"] if case.threads else list(OURS)
        if case.schedule.startswith("zb_") and not case.threads:
            names.append("peer, same order")
        if case.micro_batches == 16 and not case.threads:
            names.append("ours, gloo")
        rows += contest("sleeping", case, setting.pick(*names), setting, costs)
        if case.threads and case.schedule == "gpipe":
            rows += contest("sleeping", case, setting.pick("torchgpipe", "fairscale"), setting, costs, elsewhere=True)
        if not case.threads and case.schedule == "1f1b":
            rows += contest("sleeping", case, setting.pick("deepspeed"), setting, costs, elsewhere=True)
    return rows


def sleeping_cases(is_quick: bool) -> Iterator[Case]:
    sizes, counts = ((1,), (8,)) if is_quick else ((1, 8), (8, 16, 32))
    for lanes, threads in ((8, True), (4, False), (8, False)):
        for schedule in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
            for mib in sizes:
                for count in counts if schedule != "zb_v" or is_quick else (16,):
                    yield case_of("sleeping", schedule, lanes, count, threads=threads, mib=mib)
    yield case_of("sleeping", "gpipe", 8, 8, threads=True)


def compute(setting: Setting) -> list[Row]:
    rows = []
    batch = {"batch": 16, "length": 64} if setting.is_quick else {}
    for schedule in ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"):
        case = case_of("gpt", schedule, 2, 8, **batch)
        names = ["plain", *OURS, *(["peer, same order"] if schedule.startswith("zb_") else [])]
        names += ["plain, whole batch"] if schedule == "1f1b" else []
        began, job = time.monotonic(), job_of(case, ("plain", *setting.pick(*names[1:])), setting.rounds)
        result = run(job)
        tell(case, result, began)
        # t: the time of one process with one thread, in the same micro-batches, while the other process does the same
        plain = statistics.median(result.seconds["plain"])
        costs = equal_costs(case.num_stages, plain / 3 / 8 / case.num_stages, first_has_input=True)
        rows += rows_of("compute", case, result, costs, job.num_actions)
        if schedule == "1f1b":
            rows += contest("compute", case, setting.pick("deepspeed"), setting, costs, elsewhere=True)
    return rows


def actions(setting: Setting) -> list[Row]:
    """Time each contender alone, in several pairs of processes: gloo costs more in some pairs than in others."""
    case, rounds = case_of("linear", "1f1b", 2, 64), 5 if setting.is_quick else 15  # a step takes 50 ms
    pooled: dict[str, Result] = {}
    for _ in range(setting.rounds):
        for name in setting.pick("ours", "ours, gloo", "floor", "peer", "deepspeed"):
            is_elsewhere = name in ELSEWHERE
            if is_elsewhere and not PEERS.exists():
                continue
            began, job = time.monotonic(), job_of(case, (name,), rounds)
            result = run_elsewhere(PEERS, job) if is_elsewhere else run(job)
            tell(case, result, began)
            pool = pooled.setdefault(name, result)
            if pool is not result and name in result.seconds and name in pool.seconds:
                pool.seconds[name] += result.seconds[name]
                pool.cpu_seconds[name] += result.cpu_seconds[name]
    num_actions = job_of(case, (), 0).num_actions
    return [row for result in pooled.values() for row in rows_of("actions", case, result, None, num_actions)]


def memory(setting: Setting) -> list[Row]:
    """Count the bytes that autograd saves in a small GPT; the simulation uses the bytes that each stage saves alone."""
    rows = []
    for schedule, lanes in (("gpipe", 2), ("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2)):
        case = case_of("gpt", schedule, lanes, 8, batch=16, length=32, width=64, vocabulary=256, is_counted=True)
        began, job = time.monotonic(), job_of(case, setting.pick("ours", "floor", "peer"), 1)
        result = run(job)
        tell(case, result, began)
        for name, (alone, peaks) in result.saved_bytes.items():
            expected = penstock.simulate(build(case), Costs(saved_bytes=alone)).peak_bytes
            for lane, (found, wanted) in enumerate(zip(peaks, expected, strict=True)):
                label = f"{name}, lane {lane}"
                rows.append(row_of("memory", case, label, own_seconds=0.0, value=float(found), expected=float(wanted)))
        failed = result.failures.items()
        rows += [row_of("memory", case, n, own_seconds=0.0, note=_shorten(why)) for n, why in failed]
    return rows


def prediction(setting: Setting) -> list[Row]:
    rows = []
    batch = {"batch": 16, "length": 64} if setting.is_quick else {}
    cases = [case_of("gpt", name, 2, 8, **batch) for name in ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1")]
    cases += [case_of("sleeping", name, 4, 8) for name in ("1f1b", "zb_h1")]
    for case in cases:
        names = setting.pick("ours", "floor")
        began, job = time.monotonic(), job_of(case, names, setting.rounds, is_predicted=True)
        result = run(job)
        tell(case, result, began)
        rows += rows_of("prediction", case, result, None, job.num_actions)
        rows.append(row_of("prediction", case, "predicted", own_seconds=0.0, seconds=numbers(result.predicted_seconds)))
    return rows


def recording(setting: Setting) -> list[Row]:
    """Time `pipe.record()`: with work in the actions and, as the worst case, with almost none."""
    rows = []
    batch = {"batch": 16, "length": 64} if setting.is_quick else {}
    for case in (case_of("gpt", "1f1b", 2, 8, **batch), case_of("linear", "1f1b", 2, 64)):
        began, job = time.monotonic(), job_of(case, ("ours", "ours, recorded"), 3 * setting.rounds)
        result = run(job)
        tell(case, result, began)
        rows += rows_of("recording", case, result, None, job.num_actions)
    return rows


SECTIONS = {
    "sleeping": sleeping, "compute": compute, "actions": actions, "memory": memory, "prediction": prediction,
    "recording": recording,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="few cases, two rounds, a smaller batch; writes no files")
    parser.add_argument("--rounds", type=int, help="5 by default, 2 with --quick")
    parser.add_argument("--only", default="", help="contenders, separated by commas: ours,floor,peer,deepspeed,…")
    given = parser.parse_args()
    if wrong := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(wrong)}")
    only = tuple(filter(None, given.only.split(",")))
    setting = Setting(given.quick, given.rounds or (2 if given.quick else 5), only)
    machine = f"{os.cpu_count()} cores ({platform.machine()}), a load of {os.getloadavg()[0]:.1f} before the run"
    machine += f"; Python {platform.python_version()}, torch {version('torch')}; {setting.rounds} rounds"
    print(machine, flush=True)
    if not PEERS.exists():
        print("peers from PyPI are not installed: run benchmarks/runtime/peers_env", flush=True)
    for name in given.sections or SECTIONS:
        print(f"\n{HEADS[name]}", flush=True)
        rows = SECTIONS[name](setting)
        print("\n" + render(name, rows), flush=True)
        if not given.quick:
            everything = save(HERE / "results.csv", rows)
            present = [section for section in HEADS if any(row.section == section for row in everything)]
            tables = [f"Last run: {time.strftime('%Y-%m-%d')}, {machine}.\n", *(render(s, everything) for s in present)]
            (HERE / "results.md").write_text("\n".join(tables))


if __name__ == "__main__":
    main()
