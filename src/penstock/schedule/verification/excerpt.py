"""Excerpt: the lanes of a schedule around one marked action, for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def draw_grid(
    lanes: Sequence[Sequence[str]], *, at: Mapping[int, int], marked: tuple[int, int], around: int = 4
) -> str:
    """Return the texts of the lanes around one action each, with one action marked.

    Args:
        lanes: the texts of the actions of each lane.
        at: the index to show in the middle, for some lanes; other lanes use the index of `marked`.
        marked: (lane, index) of the action to mark.
        around: number of actions to show on each side.
    """
    centre = {lane: at.get(lane, marked[1]) for lane in range(len(lanes))}
    shown = _near(len(lanes), marked[0], set(at))
    cells: list[list[str]] = []
    for lane in shown:
        first = centre[lane] - around
        window = range(first, centre[lane] + around + 1)
        cells.append([_cell(lanes[lane], i, is_marked=(lane, i) == marked) for i in window])
    width = max(len(cell) for row in cells for cell in row)
    label = max(len(str(lane)) for lane in shown)
    lines = [
        f"lane {lane:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for lane, row in zip(shown, cells, strict=True)
    ]
    if hidden := len(lanes) - len(shown):
        lines.append(f"({hidden} more lane{'s' if hidden > 1 else ''})")
    return "\n".join(lines)


def _near(num_lanes: int, lane: int, others: set[int], most: int = 9) -> list[int]:
    wanted = {lane, *sorted(others, key=lambda other: abs(other - lane))[: most - 1]}
    for distance in range(1, num_lanes):
        if len(wanted) >= min(most, num_lanes):
            break
        wanted |= {other for other in (lane - distance, lane + distance) if 0 <= other < num_lanes}
    return sorted(wanted)


def _cell(lane: Sequence[str], index: int, *, is_marked: bool) -> str:
    text = lane[index] if 0 <= index < len(lane) else ("·" if index < 0 else "")
    return f">{text or 'end'}<" if is_marked else f" {text} "
