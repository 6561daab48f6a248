"""Count the models that train correctly on the user's path: `Pipeline(model, example=…)`, then `step`.

    .venv/bin/python benchmarks/coverage/run.py [NAME|GROUP ...] [--what ours,peer] [--jobs 2] [--timeout 300]
    .venv/bin/python benchmarks/coverage/run.py gpt2 --timeout 60      # one model, in its own process
    .venv/bin/python benchmarks/coverage/run.py --again refused,wrong  # models with these outcomes in results.csv

A group is plain, pattern, torch.nn, timm, torchvision, hf or all-hf, or one of the groups of hf.py. Each model runs in
its own process, so that a crash or a hang affects only one model. results.csv keeps the newest row of each model. The
script writes it after each model.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# workers are forked from a process that has imported everything, so that they spend no time on imports
CONTEXT = multiprocessing.get_context("forkserver")
FIELDS = ("model", "group", "dtype", "path", "nodes", "outcome", "option", "why", "note", "seconds", "stages", "peer")
Report = dict[str, Any]
Row = dict[str, str]


def groups() -> dict[str, list[str]]:
    """Return the models of each group."""
    import hf
    import pictures
    from models import ENTRIES

    found: dict[str, list[str]] = {"plain": [], "pattern": [], "torch.nn": []}
    for name, entry in ENTRIES.items():
        found[entry.group].append(name)
    found |= {group: list(names) for group, names in hf.GROUPS.items()}
    listed = {name for names in hf.GROUPS.values() for name in names}
    found["the rest of transformers"] = [name for name in hf.ALL if name not in listed]
    found["timm"] = [f"timm:{name}" for name in pictures.TIMM]
    found["torchvision"] = [f"torchvision:{name}" for name in pictures.TORCHVISION]
    return found


def chosen(words: list[str]) -> list[str]:
    """Return the models for these names and groups, each once."""
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
    """Run one worker in a new process; return its report, or a report of its crash or hang."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(there, name, what), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(timeout):
            return {"outcome": "hang", "why": f"no answer in {timeout:.0f} s", "error": "no answer"}
        return here.recv()
    except EOFError:
        process.join(5)
        return {"outcome": "crashed", "why": f"exit code {process.exitcode}", "error": "exit"}
    finally:
        process.kill()
        process.join()


def _work(connection: Connection, name: str, what: str) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import worker

    connection.send(worker.report_of(name, what))


def summary(what: str, report: Report) -> Row:
    """Return the cells of a row that come from a report."""
    if what == "ours":
        if "outcome" not in report:
            report = report | {"outcome": "not built", "why": report.get("error", "")}
        return {key: " ".join(str(report.get(key, "")).split()) for key in FIELDS if key in report}
    if "error" in report:
        return {what: f"no: {report['error']}"}
    cases = {key: text for key, text in report["results"].items() if not text.startswith("skip")}
    wrong = [f"no: {key}: {text}" for key, text in cases.items() if text != "ok"]
    return {what: "" if not cases else (wrong or ["yes"])[0]}


def run_all(names: list[str], whats: list[str], jobs: int, timeout: float, results: dict[str, Row], out: Path) -> None:
    """Run several models at once and keep a row for each."""
    group_of = {name: group for group, of_group in groups().items() for name in of_group}
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(attempt, name, what, timeout): (name, what) for name in names for what in whats}
        for number, done in enumerate(as_completed(waiting), 1):
            name, what = waiting[done]
            cells = summary(what, done.result())
            row = results.setdefault(name, {"model": name, "group": group_of.get(name, "other")})
            if what == "ours":
                for key in ("dtype", "path", "nodes", "option", "why", "note"):
                    row.pop(key, None)
            row |= cells
            write(results, out)
            text = " ".join(cells.get(key, "") for key in ("path", "seconds", "outcome", "option", "why", what))
            print(f"[{number}/{len(waiting)}] {what:6} {name:28} {text[:400]}", file=sys.stderr, flush=True)


def read(path: Path) -> dict[str, Row]:
    """Return the rows of earlier runs, by model."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def write(results: dict[str, Row], path: Path) -> None:
    """Replace the file with all rows, sorted by model."""
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(results[name] for name in sorted(results))
    part.replace(path)


def table(results: dict[str, Row]) -> str:
    """Return the counts of each group in Markdown, without models that cannot be built or compared."""
    rows: dict[str, list[Row]] = {}
    for row in results.values():
        if row.get("outcome") not in ("not built", "not comparable", "", None):
            rows.setdefault(row["group"], []).append(row)
    lines = ["| group | models | right | refused | wrong, crashed, hang | export · replay · direct | peer right |"]
    lines.append("|---|---|---|---|---|---|---|")
    everything = [row for of_group in rows.values() for row in of_group]
    for group, of_group in [*rows.items(), ("all", everything)]:
        count = Counter(row["outcome"] for row in of_group)
        paths = Counter(row["path"] for row in of_group if row["outcome"] == "right")
        by_path = " · ".join(str(paths[path]) for path in ("export", "replay", "direct"))
        bad = count["wrong"] + count["crashed"] + count["hang"]
        tried = [row["peer"] for row in of_group if row.get("peer")]
        peer = f"{sum(text == 'yes' for text in tried)} of {len(tried)}" if tried else "–"
        share = f"{count['right']} ({count['right'] / max(1, len(of_group)):.1%})"
        lines.append(f"| {group} | {len(of_group)} | {share} | {count['refused']} | {bad} | {by_path} | {peer} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models or groups; all groups if none is given")
    parser.add_argument("--what", default="ours", help="ours, stages, peer; separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv", help="rows of other models stay in this file")
    parser.add_argument("--again", default="", help="only models with one of these outcomes, separated by commas")
    parser.add_argument("--missing", action="store_true", help="only models that have no outcome")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.export._trace", "transformers", "worker"])
    results = read(given.out)
    names = chosen(given.names or (list(results) if given.again else []))
    if given.again:
        names = [name for name in names if results.get(name, {}).get("outcome") in given.again.split(",")]
    if given.missing:
        names = [name for name in names if not results.get(name, {}).get("outcome")]
    run_all(names, given.what.split(","), given.jobs, given.timeout, results, given.out)
    print(table(results))
    for name in names:
        if results[name].get("outcome") not in ("right", None):
            print(f"- {name}: {results[name].get('outcome')}: {results[name].get('why')}")


if __name__ == "__main__":
    main()
