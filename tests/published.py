"""The zero-bubble paper's tables 5 and 8, as benchmarks/published holds them."""

import csv
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks" / "published"


def rows(table):
    """Return a table's rows: counts and times as numbers, and the published bubbles that it has."""
    with (FOLDER / f"{table}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    names = [name for name in lines[0] if name.startswith(("1f1b", "zb_"))]
    return [
        {key: int(value) for key, value in line.items() if key not in names}
        | {"published": {name: float(line[name]) for name in names if line[name]}}
        for line in lines
    ]


def pending_share(row, sequence=1024):
    """Of what a transformer block saves, the share that its weight gradients need: 32 h of 34 h + 5 a s."""
    return 32 * row["hidden"] / (34 * row["hidden"] + 5 * row["heads"] * sequence)
