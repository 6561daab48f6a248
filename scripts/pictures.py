"""Draw the pictures of docs/concepts.md: simulated steps, as SVG that is readable on light and on dark pages.

`scripts/make_images` writes them. A test compares docs/images with new drawings of the current simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import penstock
from penstock.schedules import Kind

WIDTH, LABEL, RIGHT = 760, 54, 84  # in pixels: the picture, the lane names on the left, the text on the right
LANE, GAP, TITLE, FOOT, MEMORY = 22, 4, 26, 14, 58
INK = "#727c8e"  # a grey that is readable on white and on black
COLOURS = {
    Kind.F: "#4b7fe0",
    Kind.B: "#f0894a",
    Kind.I: "#f2ac3c",
    Kind.W: "#46b08c",
    Kind.RECOMPUTE: "#6fb7e8",
}
SECOND = {Kind.F: "#9dbdf5", Kind.B: "#f8c19d", Kind.I: "#f8d79b", Kind.W: "#9fd8c4"}  # for the second stage of a lane
SENDS = {Kind.SEND_F: "#2c56a8", Kind.SEND_B: "#bf5a1c"}
WORDS = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.RECOMPUTE: "forward again",
    Kind.SEND_F: "on its way forward",
    Kind.SEND_B: "on its way back",
}


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture: its title, and what to show with the lanes."""

    title: str
    timeline: penstock.Timeline
    behind: tuple[str, ...] = ()  # a text to the right of each lane
    has_memory: bool = False  # a curve of the memory of the first lane
    has_spans: bool = False  # brackets for the makespan and the longest lane span

    @property
    def height(self) -> int:
        """The height of the panel in pixels."""
        lanes = self.timeline.num_lanes * (LANE + GAP)
        return TITLE + lanes + FOOT + MEMORY * self.has_memory + 40 * self.has_spans


def draw(panels: list[Panel]) -> str:
    """Return a picture of these timelines, one below the other, with one time scale."""
    longest = max(panel.timeline.step_seconds for panel in panels)
    scale = (WIDTH - LABEL - RIGHT) / longest
    height = sum(panel.height for panel in panels) + 24
    most = max((max(panel.timeline.memory[0].held_bytes) for panel in panels if panel.has_memory), default=1.0)
    lines, top = [], 0
    for panel in panels:
        lines += _draw_panel(panel, top, scale, most)
        top += panel.height
    lines += _draw_legend(panels, top + 10)
    style = "font-family=\"system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif\" font-size=\"12\""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {style}>'
    return "\n".join([head, f"<title>{escape('; '.join(p.title for p in panels))}</title>", *lines, "</svg>", ""])


def _draw_panel(panel: Panel, top: float, scale: float, most: float) -> list[str]:
    timeline = panel.timeline
    lines = [_text(0, top + 16, panel.title, weight=600)]
    first = top + TITLE
    for lane in range(timeline.num_lanes):
        y = first + lane * (LANE + GAP)
        wide = timeline.step_seconds * scale
        lines.append(_text(0, y + 15, f"lane {lane}"))
        lines.append(
            f'<rect x="{LABEL}" y="{y}" width="{wide:.1f}" height="{LANE}" fill="#80889a" fill-opacity="0.16"/>'
        )
        if panel.behind:
            lines.append(_text(LABEL + wide + 8, y + 15, panel.behind[lane]))
    for span in timeline:
        y = first + span.lane * (LANE + GAP)
        lines += _draw_span(span, LABEL + span.start * scale, (span.end - span.start) * scale, y, timeline.num_lanes)
    below = first + timeline.num_lanes * (LANE + GAP)
    if panel.has_memory:
        lines += _draw_memory(panel, below + 8, scale, most)
    if panel.has_spans:
        lines += _draw_brackets(panel, below + 6, scale)
    return lines


def _draw_span(span: object, x: float, wide: float, y: float, num_lanes: int) -> list[str]:
    kind, stage, mb = span.action.kind, span.action.stage, span.action.mb
    if kind in SENDS and wide > 0:
        up = y + LANE - 3
        return [f'<rect x="{x:.1f}" y="{up}" width="{wide:.1f}" height="5" fill="{SENDS[kind]}"/>']
    if kind not in COLOURS:
        return []
    colour = (SECOND if stage >= num_lanes else COLOURS)[kind]
    edge = 'stroke="#ffffff" stroke-opacity="0.55" stroke-width="0.7"'
    box = f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{LANE}" rx="2" fill="{colour}" {edge}/>'
    ink = "#ffffff" if kind is Kind.F and stage < num_lanes else "#131722"
    size = 11 if wide >= 14 else 9
    middle = f'x="{x + wide / 2:.1f}" y="{y + LANE / 2 + 4:.0f}"'
    return [box] + (
        [f'<text {middle} text-anchor="middle" font-size="{size}" fill="{ink}">{mb}</text>'] if wide > 8 else []
    )


def _draw_memory(panel: Panel, top: float, scale: float, most: float) -> list[str]:
    """Draw the memory of lane 0 over time, as a step curve."""
    memory, high = panel.timeline.memory[0], MEMORY - 22
    points, last = [f"{LABEL},{top + high:.1f}"], 0.0
    steps = dict(zip(memory.seconds.tolist(), memory.held_bytes.tolist(), strict=True))  # the last value of each moment
    for second, held in steps.items():
        x = LABEL + second * scale
        points += [f"{x:.1f},{top + high - last / most * high:.1f}", f"{x:.1f},{top + high - held / most * high:.1f}"]
        last = held
    points.append(f"{LABEL + panel.timeline.step_seconds * scale:.1f},{top + high:.1f}")
    label = _text(
        LABEL + panel.timeline.step_seconds * scale + 8, top + high - 4, f"at most {max(memory.held_bytes):g}"
    )
    area = (
        f'<polygon points="{" ".join(points)}" fill="#9468d8" fill-opacity="0.3" stroke="#9468d8" stroke-width="1.2"/>'
    )
    return [_text(0, top + high - 4, "holds"), area, label]


def _draw_brackets(panel: Panel, top: float, scale: float) -> list[str]:
    timeline = panel.timeline
    lane = max(range(timeline.num_lanes), key=timeline.lane_seconds.__getitem__)
    begin = min(span.start for span in timeline if span.lane == lane)
    words = (
        (0.0, timeline.step_seconds, f"makespan {timeline.step_seconds:g} s: bubble {timeline.bubble:.1%}"),
        (
            begin,
            timeline.lane_seconds[lane],
            f"longest lane span {timeline.lane_seconds[lane]:g} s: bubble {timeline.span_bubble:.1%}",
        ),
    )
    lines = []
    for row, (start, seconds, word) in enumerate(words):
        x, wide, y = LABEL + start * scale, seconds * scale, top + 10 + row * 22
        path = f"M{x:.1f} {y - 5} v10 M{x:.1f} {y} h{wide:.1f} M{x + wide:.1f} {y - 5} v10"
        lines.append(f'<path d="{path}" stroke="{INK}" fill="none"/>')
        middle = f'x="{x + wide / 2:.1f}" y="{y - 4}" text-anchor="middle"'
        lines.append(f'<text {middle} fill="{INK}">{escape(word)}</text>')
    return lines


def _draw_legend(panels: list[Panel], top: float) -> list[str]:
    seen = {span.action.kind for panel in panels for span in panel.timeline if span.end > span.start}
    lines, x = [], float(LABEL)
    for kind, colour in {**COLOURS, **SENDS}.items():
        if kind in seen:
            lines.append(f'<rect x="{x}" y="{top}" width="11" height="11" rx="2" fill="{colour}"/>')
            lines.append(_text(x + 16, top + 10, WORDS[kind]))
            x += 32 + 6.6 * len(WORDS[kind])
    return lines


def _text(x: float, y: float, text: str, *, weight: int = 400) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}" fill="{INK}">{escape(text)}</text>'


# ---- the pictures


def _run(
    name: str, *, lanes: int = 4, micro_batches: int = 8, costs: penstock.Costs | None = None, **more: object
) -> penstock.Timeline:
    schedule = penstock.schedules.build(name, lanes=lanes, micro_batches=micro_batches)
    return penstock.simulate(schedule, costs or penstock.Costs(forward=1.0, backward=2.0), **more)


def _told(name: str, timeline: penstock.Timeline) -> str:
    return f"{name}: {timeline.step_seconds:g} s, bubble {timeline.bubble:.0%}"


def micro_batches() -> list[Panel]:
    """Show why a batch is cut into micro-batches."""
    whole = _run("gpipe", micro_batches=1, costs=penstock.Costs(forward=8.0, backward=16.0))
    return [
        Panel(_told("the batch as a whole", whole), whole),
        Panel(_told("8 micro-batches", cut := _run("gpipe")), cut),
    ]


def orders() -> list[Panel]:
    """Show that the order of actions determines what a lane must hold."""
    found = {name: _run(name) for name in ("gpipe", "1f1b")}
    return [
        Panel(_told(name, line), line, behind=tuple(f"holds {held}" for held in line.peak_saved))
        for name, line in found.items()
    ]


def split_backward() -> list[Panel]:
    """Show what splitting the backward gains."""
    return [Panel(_told(name, line := _run(name)), line) for name in ("1f1b", "zb_h1")]


def two_stages() -> list[Panel]:
    """Show two stages per lane, each with half the cost."""
    half = penstock.Costs(forward=0.5, backward=1.0)
    return [Panel(_told(name, line := _run(name, costs=half)), line) for name in ("interleaved_1f1b", "zb_v")]


def uneven() -> list[Panel]:
    """Show one slow stage, and the same work cut evenly."""
    slow = _run("1f1b", costs=penstock.Costs(forward=[1.0, 2.0, 1.0, 1.0], backward=[2.0, 4.0, 2.0, 2.0]))
    even = _run("1f1b", costs=penstock.Costs(forward=1.25, backward=2.5))
    return [
        Panel(_told("stage 1 takes twice as long", slow), slow),
        Panel(_told("the same work, cut evenly", even), even),
    ]


def transfers() -> list[Panel]:
    """Show transfers between lanes that take time."""
    costs = penstock.Costs(forward=1.0, backward=2.0, transfer=0.5)
    free, slow = _run("1f1b"), _run("1f1b", costs=costs)
    return [
        Panel(_told("links that take no time", free), free),
        Panel(_told("half a second from lane to lane", slow), slow),
    ]


def keep() -> list[Panel]:
    """Show the time that recompute costs and the memory that it saves."""
    costs = penstock.Costs(forward=1.0, backward=2.0, saved_bytes=10.0, input_bytes=1.0)
    hold, again = (_run("1f1b", costs=costs, keep=policy) for policy in ("hold", "recompute"))
    return [
        Panel(f"hold: {hold.step_seconds:g} s", hold, has_memory=True),
        Panel(f"recompute: {again.step_seconds:g} s", again, has_memory=True),
    ]


def two_bubbles() -> list[Panel]:
    """Show the two ways to count idle time."""
    line = _run("zb_h2", micro_batches=8)
    return [Panel("zb_h2", line, has_spans=True)]


PICTURES: dict[str, Callable[[], list[Panel]]] = {
    made.__name__: made
    for made in (micro_batches, orders, split_backward, two_stages, uneven, transfers, keep, two_bubbles)
}
