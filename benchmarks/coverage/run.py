"""How many models can be captured, and come out right? Ours and torch.distributed.pipelining side by side.

    .venv/bin/python benchmarks/coverage/run.py [NAME|GROUP ...] [--jobs 2] [--timeout 300] [--out results.json]
    .venv/bin/python benchmarks/coverage/run.py --only-failed results.json --out results.json

A group is plain, pattern, hf or all-hf, or one of the groups of hf.py. Each model runs in processes of its own, so that
a crash or a hang costs one model. A model is right when all its cases are: 2 and 4 stages, training and evaluation, two
batch sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# processes are forked from one that has imported everything, so that a model costs its own time and no imports
CONTEXT = multiprocessing.get_context("forkserver")
Report = dict[str, Any]


def groups() -> dict[str, list[str]]:
    """Return the models of each group."""
    import hf
    from models import ENTRIES

    found: dict[str, list[str]] = {"plain": [], "pattern": []}
    for name, entry in ENTRIES.items():
        found[entry.group].append(name)
    return found | {group: list(names) for group, names in hf.GROUPS.items()}


def group_of() -> dict[str, str]:
    return {name: group for group, names in groups().items() for name in names}


def chosen(words: list[str]) -> list[str]:
    """Return the models that names and groups stand for, each once."""
    import hf

    known = groups()
    names: list[str] = []
    for word in words or [*known]:
        if word == "hf":
            names += [name for group in hf.GROUPS for name in known[group]]
        elif word == "all-hf":
            names += hf.ALL
        else:
            names += known.get(word, [word])
    return list(dict.fromkeys(names))


def attempt(name: str, what: str, timeout: float) -> Report:
    """Run one worker in a process of its own and return its report, or what became of it."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(there, name, what), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(timeout):
            return {"model": name, "what": what, "error": f"no answer in {timeout:.0f} s"}
        return here.recv()
    except EOFError:
        process.join(5)
        return {"model": name, "what": what, "error": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _work(connection: Connection, name: str, what: str) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import worker

    connection.send(worker.report_of(name, what))


def is_right(report: Report | None) -> bool:
    """Return whether all cases that the plain model can run came out right, and there were some."""
    if not report or "error" in report:
        return False
    cases = [text for text in report["results"].values() if not text.startswith("skip")]
    return bool(cases) and all(text == "ok" for text in cases)


def first_fault(report: Report) -> str:
    if "error" in report:
        return report["error"]
    return next((f"{key}: {text}" for key, text in report["results"].items() if text != "ok"), "")


def run_all(
    names: list[str], whats: list[str], jobs: int, timeout: float, results: dict[str, Report], out: Path | None
) -> None:
    """Run models side by side and keep their reports by name."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(attempt, name, what, timeout): (name, what) for name in names for what in whats}
        for number, done in enumerate(as_completed(waiting), 1):
            name, what = waiting[done]
            report = done.result()
            results.setdefault(name, {})[what] = report
            mark = "right" if is_right(report) else "WRONG"
            text = f"{report.get('path', '')} {report.get('seconds', '')} s"
            fault = "" if mark == "right" else f"  {first_fault(report)[:240]}"
            if out is not None:
                out.write_text(json.dumps(results, indent=1, sort_keys=True))
            print(f"[{number}/{len(waiting)}] {mark} {what:5} {name:28} {text}{fault}", file=sys.stderr, flush=True)


def table(results: dict[str, Report]) -> str:
    """Return the counts of each group in Markdown."""
    own_group = group_of()
    rows: dict[str, list[Report]] = {}
    for name, report in results.items():
        rows.setdefault(own_group.get(name, "other"), []).append(report)
    lines = ["| group | models | ours right | export · replay · direct | peer right |", "|---|---|---|---|---|"]
    everything = [report for reports in rows.values() for report in reports]
    for group, reports in [*rows.items(), ("all", everything)]:
        paths = Counter(report["ours"]["path"] for report in reports if is_right(report.get("ours")))
        by_path = " · ".join(str(paths[path]) for path in ("export", "replay", "direct"))
        cells = [_share(reports, what) for what in ("ours", "peer")]
        lines.append(f"| {group} | {len(reports)} | {cells[0]} | {by_path} | {cells[1]} |")
    return "\n".join(lines)


def _share(reports: list[Report], what: str) -> str:
    known = [report[what] for report in reports if what in report]
    right = sum(is_right(report) for report in known)
    of_all = "" if len(known) == len(reports) else f" of {len(known)} tried"
    return f"{right}{of_all} ({right / max(1, len(known)):.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models or groups; all groups if none is given")
    parser.add_argument("--what", default="ours,peer", help="ours, peer, plain, with commas between")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--out", type=Path, help="where the results go; earlier ones of other models are kept")
    parser.add_argument("--only-failed", type=Path, help="run again what failed, or is missing, in earlier results")
    given = parser.parse_args()
    whats = given.what.split(",")
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.export._trace", "transformers", "worker"])
    results: dict[str, Report] = {}
    for earlier in (given.out, given.only_failed):
        if earlier and earlier.exists():
            results |= json.loads(earlier.read_text())
    names = chosen(given.names or (list(results) if given.only_failed else []))
    if given.only_failed:
        names = [name for name in names if not is_right(results.get(name, {}).get(whats[0]))]
    try:
        run_all(names, whats, given.jobs, given.timeout, results, given.out)
    finally:
        if given.out:
            given.out.write_text(json.dumps(results, indent=1, sort_keys=True))
    print(table(results))
    faults = [(name, first_fault(results[name][what]), what) for name in names for what in whats]
    print("\n".join(f"- {what} {name}: {fault}" for name, fault, what in faults if fault and what != "peer"))


if __name__ == "__main__":
    main()
