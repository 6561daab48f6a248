"""Model strip: a self-contained page that shows a model as a strip of nodes with its cuts and a table of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Literal

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.report.page_assembly import Json, assemble
from penstock.report.stage_table import StageRow

# The files of the script, in the order of their dependencies.
_SCRIPTS = (
    "format.js",
    "dom.js",
    "view.js",
    "palette.js",
    "gestures.js",
    "strip_data.js",
    "strip_draw.js",
    "strip_build.js",
    "strip_main.js",
)

NodeKind = Literal["parameters", "attention", "matrix product", "other", "free"]
KIND_WORDS: dict[NodeKind, str] = {
    "parameters": "uses parameters",
    "attention": "attention",
    "matrix product": "a matrix product without parameters",
    "other": "any other node",
    "free": "free: recomputed in each stage that needs it",
}


@dataclass(frozen=True)
class NodeMark:
    """The data of a node on the page; times are for one micro-batch."""

    name: str
    op: str
    module: str
    kind: NodeKind
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    saved_bytes: float
    parameter_bytes: float
    inputs: str
    outputs: str
    source: str


@dataclass(frozen=True)
class Arc:
    """A value that skips stages, from its maker to the first node of a later stage that uses it."""

    first: int
    last: int
    shape: str
    num_bytes: int
    stages: tuple[int, int]


@dataclass(frozen=True)
class Strip:
    """All data of the page.

    Attributes:
        title: the name of the model.
        figures: names and values for the head of the page.
        lines: sentences below the figures.
        notes: sentences below the table of stages.
        nodes: the nodes in the order in which they run.
        stages: the stages with their nodes and the values that cross the cut after each.
        arcs: the values that skip stages.
    """

    title: str
    figures: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    nodes: tuple[NodeMark, ...]
    stages: tuple[StageRow, ...]
    arcs: tuple[Arc, ...] = ()


def write_strip(strip: Strip, path: str | PathLike[str]) -> None:
    """Write the page.

    Raises:
        UsageError: if there is nothing to draw.
        OutputError: if the file cannot be written.
    """
    if not strip.nodes or not strip.stages:
        raise UsageError("nothing to draw: no nodes, or no stages")
    title = f"{strip.title} · Penstock stages"
    page = assemble("strip.html", title=title, styles=["page.css", "strip.css"], scripts=_SCRIPTS, data=_data(strip))
    write_whole(path, page)


def _data(strip: Strip) -> Json:
    return {
        "title": strip.title,
        "figures": strip.figures,
        "lines": strip.lines,
        "notes": strip.notes,
        "kinds": [{"name": name, "words": words} for name, words in KIND_WORDS.items()],
        "nodes": _columns(strip.nodes),
        "stages": [_stage(stage) for stage in strip.stages],
        "arcs": [asdict(arc) for arc in strip.arcs],
    }


def _columns(nodes: Sequence[NodeMark]) -> Json:
    """Return nodes as columns; each text is stored once, and columns of texts hold its number."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    columns: dict[str, object] = {"name": [node.name for node in nodes]}
    for name in ("op", "module", "inputs", "outputs", "source"):
        columns[name] = [number(getattr(node, name)) for node in nodes]
    columns["kind"] = [list(KIND_WORDS).index(node.kind) for node in nodes]
    for name in ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "saved_bytes", "parameter_bytes"):
        columns[name] = [float(f"{getattr(node, name):.6g}") for node in nodes]
    columns["texts"] = list(texts)
    return columns


def _stage(stage: StageRow) -> Json:
    derived = ("backward_seconds", "memory_bytes", "crossing_bytes")
    crossing = [
        asdict(value) | {"skips": value.skips_at(stage.index)}
        for value in sorted(stage.crossing, key=lambda value: -value.num_bytes)
    ]
    return asdict(stage) | {name: getattr(stage, name) for name in derived} | {"crossing": crossing}
