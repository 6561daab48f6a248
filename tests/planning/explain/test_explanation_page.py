"""The strip page in a real browser: it draws nodes, cuts and skips where they are, moves, and trusts no name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from browser import open_browser
from penstock.errors import OutputError, UsageError
from penstock.model.graph import Graph, Node, Parameter, Size, Value
from penstock.model.profile import Profile
from penstock.planning.explain.explanation import Explanation
from penstock.planning.explain.explanation_page import strip_of, write_strip
from penstock.planning.partition.partition import partition
from penstock.planning.simulate import simulate
from penstock.schedule.builders.one_f_one_b import build_1f1b

HOSTILE = '</script><img src=x onerror="window.hacked = 1">{{data}} & <b>\'\u2028'

Open = Callable[..., Page]


def explained(num_nodes: int = 24, stages: int = 4, name: str = "net") -> Explanation:
    """Return a chain whose first value is used again at the end; every third node has a parameter, some are free."""
    values = [Value("x", -1, (Size(0, 1), Size(8)), "float32", 4)]
    values += [Value(f"v{i}", i, (Size(0, 1), Size(8)), "float32", 4, has_grad=True) for i in range(num_nodes)]
    nodes = tuple(
        Node(
            name=f"{name}_{i}",
            op="linear" if i % 3 == 0 else "attention" if i % 3 == 1 else "add",
            module=f"{name}.h.{i // 4}",
            inputs=(i, 1) if i == num_nodes - 1 else (i,),
            outputs=(i + 1,),
            parameters=(f"p{i}",) if i % 3 == 0 else (),
            is_free=i == 4,
            source=f"{Path.cwd()}/model.py:{i}",
        )
        for i in range(num_nodes)
    )
    parameters = {f"p{i}": Parameter(f"p{i}", 4096) for i in range(0, num_nodes, 3)}
    graph = Graph(nodes, tuple(values), (0,), (num_nodes,), parameters, batch_size=2)
    seconds = np.where(np.arange(num_nodes) % 3 == 0, 3e-3, 1e-3)
    profile = Profile(graph, 2, seconds, seconds, seconds, np.full(num_nodes, 100.0), np.full(num_nodes, 50.0))
    schedule = build_1f1b(lanes=stages, micro_batches=6)
    cuts = partition(profile, schedule=schedule)
    timeline = simulate(schedule, profile.costs(cuts.cuts))
    return Explanation(name, "export", "a reason", profile, cuts, schedule, timeline)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open the page of an explanation; at the end of the test it must have logged nothing and requested nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    troubles: list[str] = []

    def open_strip(explanation: Explanation, scheme: str = "light") -> Page:
        path = tmp_path / "strip.html"
        explanation.to_html(path)
        page = context.new_page()
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.on(
            "console", lambda message: None if "willReadFrequently" in message.text else troubles.append(message.text)
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: troubles.extend({request.url} - {path.as_uri()}))
        page.goto(path.as_uri())
        page.wait_for_function("window.penstock && window.penstock.stats.draws > 0")
        return page

    yield open_strip
    context.close()
    assert troubles == []


def place(page: Page, what: str, number: int) -> tuple[float, float]:
    at = page.evaluate("([what, number]) => penstock.place(what, number)", [what, number])
    return at["x"], at["y"]


def hover(page: Page, what: str, number: int) -> str:
    page.mouse.move(*place(page, what, number))
    return page.locator("#tooltip").inner_text()


def settled(page: Page) -> dict[str, float]:
    """Return what is on show, once the page has drawn it."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("({ start: penstock.view.start, end: penstock.view.end, shown: penstock.stats.shown })")


def pixel(page: Page, what: str, number: int) -> list[int]:
    x, y = place(page, what, number)
    return page.evaluate(
        """([x, y]) => {
            const canvas = document.querySelector("canvas");
            const box = canvas.getBoundingClientRect();
            const at = [Math.floor(x - box.left), Math.floor(y - box.top)];
            return [...canvas.getContext("2d").getImageData(...at, 1, 1).data];
        }""",
        [x, y],
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nodes_lie_in_order_and_bear_their_stages_colour(open_page: Open, scheme: str) -> None:
    explanation = explained()
    page = open_page(explanation, scheme)
    xs = [place(page, "node", i)[0] for i in range(24)]
    assert xs == sorted(xs)
    heads = [pixel(page, "stage", stage) for stage in range(4)]
    assert len({tuple(head) for head in heads}) == 4
    for node in range(0, 24, 3):  # a node with parameters has its stage's full colour
        assert pixel(page, "node", node) == heads[explanation.stage_of[node]]
    places = page.evaluate("Array.from(penstock.state.places)")
    widths = np.diff(places)
    assert places[-1] == pytest.approx(1)
    assert widths[3] > 2 * widths[4] > 0  # by time, and none without width


def test_a_node_tells_what_is_known_about_it(open_page: Open) -> None:
    page = open_page(explained())
    text = hover(page, "node", 3)
    for words in ("linear", "3: net_3", "net.h.0", "3 ms", "100 B", "4 KiB", "float32[batch, 8]", "model.py:3"):
        assert words in text, words
    assert str(Path.cwd()) not in text
    assert "free" in hover(page, "node", 4)


def test_cuts_stages_skips_and_modules_tell_theirs(open_page: Open) -> None:
    explanation = explained()
    page = open_page(explanation)
    crossing = explanation.stages[1].crossing
    assert {value.skips_at(1) for value in crossing} == {True, False}
    text = hover(page, "cut", 1)
    assert "128 B" in text
    assert "stage 0 → 3" in text
    assert "crosses the cut after stage 1" in text
    assert "stage 2" in hover(page, "stage", 2)
    assert "skips stages" in hover(page, "arc", 0)
    assert "module" in hover(page, "level", 0)
    assert len(strip_of(explanation)["arcs"]) == 1


def test_the_table_has_every_stage_and_cut(open_page: Open) -> None:
    explanation = explained()
    page = open_page(explanation)
    rows = page.locator(".stages tbody tr.stage").all_inner_texts()
    assert len(rows) == 4
    assert explanation.stages[2].modules_text in rows[2]
    cuts = page.locator(".stages tbody tr.cut").all_inner_texts()
    assert [f"cut at {cut}:" in text for cut, text in zip(explanation.partition.cuts, cuts, strict=True)] == [True] * 3
    assert "captured by export: a reason" in page.locator(".head").inner_text()
    assert "predicted step" in page.locator(".head").inner_text()


def test_it_zooms_pans_and_goes_back(open_page: Open) -> None:
    page = open_page(explained())
    whole = settled(page)
    page.locator("tr.stage").nth(2).click()
    near = settled(page)
    assert near["end"] - near["start"] < 0.5
    assert near["shown"] < whole["shown"]
    assert "nodes" in page.locator("#window").inner_text()
    page.keyboard.press("ArrowLeft")
    assert settled(page)["start"] < near["start"]
    page.keyboard.press("0")
    assert settled(page) == whole
    page.mouse.move(*place(page, "node", 12))
    page.mouse.wheel(0, -300)
    assert settled(page)["end"] - settled(page)["start"] < 1
    page.click("#reset")
    page.mouse.click(*place(page, "stage", 1))
    assert settled(page)["end"] - settled(page)["start"] < 0.5
    page.click("#reset")
    page.keyboard.press("w")
    settled(page)
    widths = np.diff(page.evaluate("Array.from(penstock.state.places)"))
    assert widths == pytest.approx([1 / 24] * 24)
    assert page.get_attribute("#even", "aria-pressed") == "true"


def test_thousands_of_nodes_are_drawn(open_page: Open) -> None:
    page = open_page(explained(6000, stages=8))
    assert settled(page)["shown"] == 6000
    page.locator("tr.stage").nth(3).click()
    assert 500 < settled(page)["shown"] < 1100


def test_one_stage_has_no_cuts(open_page: Open) -> None:
    page = open_page(explained(stages=1))
    assert page.locator("tr.cut").count() == 0
    assert "the whole model" in page.locator("tr.stage").inner_text()


def test_no_name_is_trusted(open_page: Open) -> None:
    page = open_page(explained(name=HOSTILE.replace(".", "")))
    assert HOSTILE.replace(".", "").split("\u2028")[0] in page.locator("h2").inner_text()
    hover(page, "node", 3)
    hover(page, "cut", 0)
    hover(page, "level", 0)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_what_cannot_be_drawn_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        write_strip({"title": "x", "nodes": {"name": []}, "stages": []}, tmp_path / "x.html")
    with pytest.raises(OutputError, match="cannot be written"):
        explained().to_html(tmp_path / "no" / "x.html")
