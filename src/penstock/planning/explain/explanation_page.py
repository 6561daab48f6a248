"""Explanation page: a self-contained page with the nodes of a model as a strip, its cuts, and a table of stages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.model.graph import Node
from penstock.planning.explain.explanation_text import sentences
from penstock.report.page_assembly import Json, assemble
from penstock.report.units import show_bytes, show_count, show_seconds, show_share

if TYPE_CHECKING:
    from penstock.planning.explain.explanation import Explanation, StageRow

# The files of the script, in the order of their dependencies.
_SCRIPTS = ["format", "dom", "view", "palette", "gestures", "strip_data", "strip_draw", "strip_build", "strip_main"]
_MATMUL = re.compile(r"(add|baddb)?(mm|mv)|matmul|bmm|einsum|(bi)?linear|conv\w*", re.IGNORECASE)
_MOST_ARCS = 400  # the largest are drawn; more would hide each other
_KINDS = {  # of nodes
    "parameters": "uses parameters",
    "attention": "attention",
    "matrix product": "a matrix product without parameters",
    "other": "any other node",
    "free": "free: recomputed in each stage that needs it",
}


def write_strip(strip: dict[str, Any], path: str | PathLike[str]) -> None:
    """Write the page of the data that `strip_of` returns.

    Raises:
        UsageError: if there is nothing to draw.
        OutputError: if the file cannot be written.
    """
    write_whole(path, page_of(strip))


def page_of(strip: dict[str, Any]) -> str:
    """Return the page of the data that `strip_of` returns, as text.

    Raises:
        UsageError: if there is nothing to draw.
    """
    if not strip["nodes"]["name"] or not strip["stages"]:
        raise UsageError("nothing to draw: no nodes, or no stages")
    title, styles = f"{strip['title']} · Penstock stages", ["page.css", "strip.css"]
    return assemble("strip.html", title=title, styles=styles, scripts=_SCRIPTS, data=strip)


def strip_of(explanation: Explanation) -> dict[str, Any]:
    """Return the data of the page."""
    return {
        "title": explanation.model,
        "figures": list(_figures(explanation)),
        "lines": [f"captured by {explanation.path}: {_short_source(explanation.reason)}"],
        "notes": sentences(explanation),
        "kinds": [{"name": name, "words": words} for name, words in _KINDS.items()],
        "nodes": _nodes(explanation),
        "stages": [_stage(stage) for stage in explanation.stages],
        "arcs": _arcs(explanation),
    }


def _figures(explanation: Explanation) -> Iterable[tuple[str, str]]:
    timeline, schedule = explanation.timeline, explanation.schedule
    yield "parameters", show_count(explanation.num_parameters, digits=3)
    yield "nodes", str(len(explanation.graph.nodes))
    yield "schedule", f"{schedule.name}, {schedule.num_lanes} × {schedule.num_mbs}"
    yield "balance", f"{explanation.balance:.3f}"
    yield "fullest lane", show_bytes(max(explanation.partition.lane_bytes), digits=3)
    yield "predicted step", show_seconds(timeline.step_seconds, digits=3)
    yield "bubble of the makespan", show_share(timeline.bubble)
    yield "compared with one lane", f"{explanation.speedup:.2f} × as fast"


def _nodes(explanation: Explanation) -> Json:
    """Return nodes as columns; each text is stored once, and columns of texts hold its number."""
    graph, profile, nodes = explanation.graph, explanation.profile, explanation.graph.nodes
    texts: dict[str, int] = {}

    def numbers(words: Iterable[str]) -> list[int]:
        return [texts.setdefault(word, len(texts)) for word in words]

    def shapes(values: tuple[int, ...]) -> str:
        return ", ".join(str(graph.values[value]) for value in values)

    def rounded(column: Iterable[float]) -> list[float]:
        return [float(f"{number:.6g}") for number in column]

    return {
        "name": [node.name for node in nodes],
        "op": numbers(node.op for node in nodes),
        "module": numbers(node.module for node in nodes),
        "inputs": numbers(shapes(node.inputs) for node in nodes),
        "outputs": numbers(shapes(node.outputs) for node in nodes),
        "source": numbers(_short_source(node.source) for node in nodes),
        "kind": [list(_KINDS).index(_kind(node)) for node in nodes],
        "forward_seconds": rounded(profile.forward),
        "input_grad_seconds": rounded(profile.input_grad),
        "weight_grad_seconds": rounded(profile.weight_grad),
        "saved_bytes": rounded(profile.saved_bytes),
        "parameter_bytes": rounded(profile.weight_bytes([index]) for index in range(len(nodes))),
        "texts": list(texts),
    }


def _kind(node: Node) -> str:
    if node.is_free:
        return "free"
    if "attention" in node.op.lower():
        return "attention"
    if node.parameters:
        return "parameters"
    return "matrix product" if _MATMUL.fullmatch(node.op) else "other"


def _short_source(source: str) -> str:
    """Return paths without the part that differs between machines: relative to site-packages or to this folder."""
    plain = re.sub(r"\S*/(site|dist)-packages/", "", source.replace("\\", "/"))
    return plain.replace(f"{Path.cwd().as_posix()}/", "")


def _stage(stage: StageRow) -> Json:
    crossing = [
        asdict(value) | {"skips": value.skips_at(stage.index)}
        for value in sorted(stage.crossing, key=lambda value: -value.num_bytes)
    ]
    return stage.to_dict() | {"crossing": crossing}


def _arcs(explanation: Explanation) -> list[dict[str, Any]]:
    """Return the values that skip a stage, largest first, from their maker to their first use in a later stage."""
    graph, stage_of = explanation.graph, explanation.stage_of
    found: list[dict[str, Any]] = []
    for index, value in enumerate(graph.values):
        if graph.is_free(index):
            continue
        source, size = stage_of[value.producer], value.bytes_at(explanation.profile.batch_size)
        first_in: dict[int, int] = {}
        for user in graph.users_of[index]:
            first_in.setdefault(stage_of[user], user)
        found += [
            {"first": value.producer, "last": user, "shape": str(value), "num_bytes": size, "stages": [source, stage]}
            for stage, user in first_in.items()
            if stage > source + 1
        ]
    return sorted(found, key=lambda arc: -int(arc["num_bytes"]))[:_MOST_ARCS]
