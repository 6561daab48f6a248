"""Compare Penstock's bubbles with those in tables 5 and 8 of the zero-bubble paper, for the same inputs.

    .venv/bin/python benchmarks/published/run.py [--quick]

`=`: Penstock's bubble equals the published one. `<`: it is smaller (searched schedules, with the same memory limit).
"""

import csv
import sys
import time
from pathlib import Path

from penstock import Costs, schedules, simulate

FOLDER = Path(__file__).parent


def pending_share(row: dict[str, str]) -> float:
    """Return the share of a transformer block's saved bytes that its weight gradients need."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    return 32 * hidden / (34 * hidden + 5 * heads * 1024)


def costs_of(row: dict[str, str], stages_per_lane: int = 1) -> Costs:
    """Return the costs of a row per stage; the unit of bytes is what a lane saves for one micro-batch."""
    share = 1 / stages_per_lane
    return Costs(
        forward=int(row["F"]) * share,
        input_grad=int(row["I"]) * share,
        weight_grad=int(row["W"]) * share,
        transfer=int(row["transfer"]),
        saved_bytes=share,
        pending_bytes=pending_share(row) * share,
    )


def measure(name: str, row: dict[str, str]) -> tuple[float, float, float]:
    """Return the bubble of the longest lane span, the peak in the unit of `costs_of`, and the seconds to build."""
    costs = costs_of(row, 2 if name == "zb_v" else 1)
    begin = time.perf_counter()
    schedule = schedules.build(name, lanes=int(row["lanes"]), micro_batches=int(row["micro_batches"]), costs=costs)
    seconds = time.perf_counter() - begin
    timeline = simulate(schedule, costs)
    return timeline.span_bubble, max(timeline.peak_bytes), seconds


def read_rows(table: str) -> list[dict[str, str]]:
    """Return the rows of a table: the inputs, and the published bubbles if the paper has them."""
    with (FOLDER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    quick = "--quick" in sys.argv
    for table in ("table5", "table8"):
        rows = read_rows(table)
        names = [name for name in rows[0] if name.startswith(("1f1b", "zb_")) and any(row[name] for row in rows)]
        print(f"\n{table}: published → Penstock; for searched schedules, peak ÷ limit, and the seconds to build\n")
        print("| lanes × micro-batches | F, I, W, transfer (µs) | " + " | ".join(names) + " |")
        print("|---" * (len(names) + 2) + "|")
        for row in rows:
            cells = [show(name, row, quick=quick) for name in names]
            times = ", ".join(row[key] for key in ("F", "I", "W", "transfer"))
            print(f"| {row['lanes']} × {row['micro_batches']} | {times} | " + " | ".join(cells) + " |", flush=True)


def show(name: str, row: dict[str, str], *, quick: bool) -> str:
    is_searched = name in ("zb_1p", "zb_2p", "zb_v")
    if not row[name] or (quick and is_searched):
        return "–"
    bubble, peak, seconds = measure(name, row)
    published, ours = float(row[name]), round(bubble, 4)
    sign = "=" if ours == published else "<" if ours < published else "> !"
    text = f"{published:.4f} → {ours:.4f} {sign}"
    if is_searched:
        limit = int(row["lanes"]) * (2 if name == "zb_2p" else 1)
        text += f" ({peak / limit:.3f}, {seconds:.1f} s)"
    return text


if __name__ == "__main__":
    main()
