"""Explanation page: the data of the strip of nodes that shows an explanation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.model.graph import Node
from penstock.planning.explain.explanation_text import sentences
from penstock.report.model_strip import Arc, NodeKind, NodeMark, Strip
from penstock.report.units import show_bytes, show_count, show_seconds, show_share

if TYPE_CHECKING:
    from penstock.planning.explain.explanation import Explanation

_MATMUL = re.compile(r"(add|baddb)?(mm|mv)|matmul|bmm|einsum|(bi)?linear|conv\w*", re.IGNORECASE)
_MOST_ARCS = 400  # the largest are drawn; more would hide each other


def strip_of(explanation: Explanation) -> Strip:
    """Return the data of the page."""
    return Strip(
        title=explanation.model,
        figures=tuple(_figures(explanation)),
        lines=(f"captured by {explanation.path}: {_short_source(explanation.reason)}",),
        notes=tuple(sentences(explanation)),
        nodes=tuple(_marks(explanation)),
        stages=explanation.stages,
        arcs=tuple(_arcs(explanation)),
    )


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


def _marks(explanation: Explanation) -> Iterable[NodeMark]:
    graph, profile = explanation.graph, explanation.profile

    def shapes(values: tuple[int, ...]) -> str:
        return ", ".join(str(graph.values[value]) for value in values)

    for index, node in enumerate(graph.nodes):
        yield NodeMark(
            name=node.name,
            op=node.op,
            module=node.module,
            kind=_kind(node),
            forward_seconds=float(profile.forward[index]),
            input_grad_seconds=float(profile.input_grad[index]),
            weight_grad_seconds=float(profile.weight_grad[index]),
            saved_bytes=float(profile.saved_bytes[index]),
            parameter_bytes=profile.weight_bytes([index]),
            inputs=shapes(node.inputs),
            outputs=shapes(node.outputs),
            source=_short_source(node.source),
        )


def _kind(node: Node) -> NodeKind:
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


def _arcs(explanation: Explanation) -> list[Arc]:
    """Return the values that skip a stage, largest first, from their maker to their first use in a later stage."""
    graph, stage_of = explanation.graph, explanation.stage_of
    found = []
    for index, value in enumerate(graph.values):
        if graph.is_free(index):
            continue
        source = stage_of[value.producer]
        first_in: dict[int, int] = {}
        for user in graph.users_of[index]:
            first_in.setdefault(stage_of[user], user)
        found += [
            Arc(value.producer, user, str(value), value.bytes_at(explanation.profile.batch_size), (source, stage))
            for stage, user in first_in.items()
            if stage > source + 1
        ]
    return sorted(found, key=lambda arc: -arc.num_bytes)[:_MOST_ARCS]
