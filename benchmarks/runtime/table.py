"""Store results as rows of a CSV file, and make tables from them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tasks import Case

HEADS = {
    "sleeping": "Sleeping stages: 10 ms forward, 10 ms input gradient, 10 ms weight gradient",
    "compute": "Real compute: a GPT of 8 blocks, two processes of one thread on two cores",
    "actions": "Per action: the CPU time of an action that does almost nothing",
    "memory": "Memory: the peak of the values that autograd saves, per lane",
    "prediction": "Prediction: the step time predicted from a profile",
    "recording": "Recording: the time that `pipe.record()` adds to a step",
}


@dataclass(frozen=True)
class Row:
    """The measurements of one contender in one case. Lists are texts with one number per round."""

    section: str
    model: str
    where: str
    schedule: str
    mib: int
    micro_batches: int
    contender: str
    own_seconds: float  # the time of the contender's own schedule, simulated
    seconds: str = ""
    cpu_seconds: str = ""
    num_actions: int = 0
    nap_seconds: float = 0.0  # how long a sleep of 10 ms takes if all lanes only sleep
    error: float = 0.0  # relative, compared with the plain model
    value: float = 0.0  # bytes
    expected: float = 0.0  # simulated bytes
    note: str = ""

    @property
    def case(self) -> tuple[str, str, str, int, int]:
        return self.model, self.where, self.schedule, self.mib, self.micro_batches

    @property
    def times(self) -> list[float]:
        return [float(text) for text in self.seconds.split()]

    @property
    def cpu_times(self) -> list[float]:
        return [float(text) for text in self.cpu_seconds.split()]


def row_of(section: str, case: Case, contender: str, **known: object) -> Row:
    where = f"{case.lanes} {'threads' if case.threads else 'processes'}"
    mib = case.mib if case.model == "sleeping" else 0
    return Row(section, case.model, where, case.schedule, mib, case.micro_batches, contender, **known)


def numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def spread(values: list[float], unit: str = "") -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g}){unit}"


def ratio(above: list[float], below: list[float], *, with_compile_lock: bool = True) -> str:
    """Return the ratio: within rounds if both were timed in turn, otherwise of the medians."""
    if not above or not below:
        return "–"
    if not with_compile_lock:
        return f"{statistics.median(above) / statistics.median(below):.3g}"
    return spread([a / b for a, b in zip(above, below, strict=True)])


def save(path: Path, rows: list[Row]) -> list[Row]:
    """Replace the rows of the same sections in the file; return all rows of the file."""
    fresh = {row.section for row in rows}
    everything = [row for row in load(path) if row.section not in fresh] + rows
    everything.sort(key=lambda row: list(HEADS).index(row.section))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in everything)
    return everything


def load(path: Path) -> list[Row]:
    if not path.exists():
        return []
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}
    with path.open(newline="") as file:
        return [Row(**{name: kinds[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def render(section: str, rows: list[Row]) -> str:
    """Return the table of a section as Markdown."""
    cases: dict[tuple[str, str, str, int, int], dict[str, Row]] = {}
    for row in rows:
        if row.section == section:
            cases.setdefault(row.case, {})[row.contender] = row
    head = _COLUMNS[section].split(" | ")
    cells = [head, ["---"] * len(head), *(found for case in cases.values() for found in _LINES[section](case))]
    failed = [
        f"- {row.contender}, {row.schedule}, {row.where}, {row.micro_batches} micro-batches: {row.note}"
        for case in cases.values()
        for row in case.values()
        if row.note
    ]
    table = "\n".join("| " + " | ".join(cell for cell in line) + " |" for line in cells)
    return "\n\n".join([f"### {HEADS[section]}", table, *(["\n".join(failed)] if failed else [])]) + "\n"


Named = dict[str, Row]
ELSEWHERE = ("deepspeed", "torchgpipe", "fairscale")  # these run in their own environment and their own processes


def _times(case: Named, name: str) -> list[float]:
    return case[name].times if name in case else []


def _over_own(case: Named, name: str) -> str:
    """Return the seconds, and the seconds divided by the schedule's own time."""
    if not (times := _times(case, name)):
        return "–"
    own = case[name].own_seconds
    low, middle, high = min(times) / own, statistics.median(times) / own, max(times) / own
    return f"{statistics.median(times):.3f}: {middle:.2f} ({low:.2f}–{high:.2f})"


def _sleeping(case: Named) -> list[list[str]]:
    row = next(iter(case.values()))
    own = next((r.own_seconds for name, r in case.items() if name != "peer"), row.own_seconds)
    cells = [row.where, row.schedule, str(row.mib), str(row.micro_batches), f"{own:.3f}"]
    cells.append(f"{1e3 * max(r.nap_seconds for r in case.values()):.2f}")
    cells += [_over_own(case, name) for name in ("ours", "ours, gloo", "floor", "peer", "peer, same order")]
    cells += [", ".join(f"{n} {_over_own(case, n)}" for n in ELSEWHERE if _times(case, n)) or "–"]
    cells += [ratio(_times(case, "ours"), _times(case, name)) for name in ("floor", "peer")]
    return [cells]


def _compute(case: Named) -> list[list[str]]:
    row = next(iter(case.values()))
    plain = _times(case, "plain")
    over = row.own_seconds / statistics.median(plain)  # ideal ÷ t; the ideal of a round follows from t of that round
    cells = [row.schedule, spread(plain), f"{row.own_seconds:.3f}"]
    for name in ("ours", "floor", "peer", "peer, same order", "deepspeed"):
        times = _times(case, name)
        share = ratio([over * t for t in plain], times, with_compile_lock=name not in ELSEWHERE)
        cells.append(f"{statistics.median(times):.3g}: {share}" if times else "–")
    return [[*cells, ratio(_times(case, "ours"), _times(case, "peer"))]]


def _actions(case: Named) -> list[list[str]]:
    lines = []
    for name, row in case.items():
        if not row.times:
            continue
        micro = [1e6 * seconds / row.num_actions for seconds in row.cpu_times]
        lanes = int(row.where.split()[0])
        wall = [1e6 * seconds / row.num_actions * lanes for seconds in row.times]
        over = [
            ratio(row.cpu_times, case[other].cpu_times, with_compile_lock=False) if other in case else "–"
            for other in ("floor", "peer")
        ]
        lines.append([name, row.schedule, str(row.micro_batches), spread(micro), spread(wall), *over])
    return lines


def _memory(case: Named) -> list[list[str]]:
    return [
        [
            r.schedule,
            r.where,
            name,
            f"{r.value / 2**20:.3f}",
            f"{r.expected / 2**20:.3f}",
            f"{r.value / r.expected:.4f}",
        ]
        for name, r in case.items()
        if r.expected
    ]


def _prediction(case: Named) -> list[list[str]]:
    row = case.get("predicted")
    if row is None or not row.times:
        return []
    cells = [row.model, row.where, row.schedule, str(row.micro_batches), spread(row.times)]
    for name in ("ours", "floor"):
        cells += [spread(_times(case, name)), ratio(row.times, _times(case, name))]
    return [cells]


def _recording(case: Named) -> list[list[str]]:
    plain, recorded = case["ours"], case["ours, recorded"]
    return [
        [
            plain.model,
            plain.where,
            str(plain.micro_batches),
            spread(plain.times),
            spread(recorded.times),
            ratio(recorded.times, plain.times),
            f"{min(recorded.times) / min(plain.times):.3f}",
            ratio(recorded.cpu_times, plain.cpu_times),
        ]
    ]


_LINES = {
    "sleeping": _sleeping,
    "compute": _compute,
    "actions": _actions,
    "memory": _memory,
    "prediction": _prediction,
    "recording": _recording,
}
_COLUMNS = {
    "sleeping": "lanes | schedule | MiB | micro-batches | own time, s | a nap, ms | ours, s: ÷ own time | ours by gloo "
    "| floor | peer | peer, our order | other peers | ours / floor | ours / peer",
    "compute": "schedule | t, s | ideal, s | ours, s: share of ideal | floor | peer | peer, our order | deepspeed "
    "| ours / peer",
    "actions": " | schedule | micro-batches | CPU µs per action | wall µs per action of a lane | CPU / floor "
    "| CPU / peer",
    "memory": "schedule | lanes |  | measured, MiB | simulated, MiB | measured / simulated",
    "prediction": "model | lanes | schedule | micro-batches | predicted, s | ours, s | predicted / ours | floor, s "
    "| predicted / floor",
    "recording": "model | lanes | micro-batches | without, s | recorded, s | recorded / without "
    "| of the fastest steps | CPU time",
}
