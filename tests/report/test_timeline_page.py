"""The page in a real browser: it draws what the timeline says, moves, compares, and trusts no name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

from browser import open_browser
from penstock.errors import OutputError, UsageError
from penstock.model.costs import Costs
from penstock.planning.attribution import find_causes
from penstock.planning.simulate import simulate
from penstock.report.timeline import Timeline
from penstock.report.timeline_page import write_html
from penstock.schedule.actions import Kind
from penstock.schedule.builders.dualpipe import dualpipe
from penstock.schedule.builders.one_f_one_b import build_1f1b
from penstock.schedule.builders.zero_bubble import zb_h1
from penstock.schedule.lower import lower
from penstock.schedules import build

COSTS = Costs(forward=1, input_grad=1, weight_grad=1, transfer=0.1, saved_bytes=1 << 30, pending_bytes=1 << 28)
WIDTH = 1280
HOSTILE = '</script><img src=x onerror="window.hacked = 1">{{data}} & <b>\'\u2028\ud800'

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open a page of timelines; at the end of the test it must have logged nothing and requested nothing."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900})
    troubles: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if "willReadFrequently" not in message.text:  # a hint about the reads that these tests do
            troubles.append(message.text)

    def on_dialog(dialog: Dialog) -> None:
        troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open_timelines(*timelines: Timeline, scheme: str = "light") -> Page:
        path = tmp_path / "page.html"
        write_html(timelines, path)
        page = context.new_page()
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.on("console", on_console)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", on_dialog)
        page.on("request", lambda request: troubles.extend({request.url} - {path.as_uri()}))
        page.goto(path.as_uri())
        page.wait_for_function("window.penstock && window.penstock.stats.draws > 0")
        return page

    yield open_timelines
    context.close()
    assert troubles == []


@pytest.fixture(scope="module")
def step() -> Timeline:
    return simulate(zb_h1(lanes=8, micro_batches=16), COSTS)


@pytest.fixture(scope="module")
def slower() -> Timeline:
    return simulate(build_1f1b(lanes=8, micro_batches=16), COSTS)


def find(timeline: Timeline, text: str) -> tuple[int, float, float]:
    return next((span.lane, span.start, span.end) for span in timeline if str(span.action) == text)


def pixel(page: Page, lane: int, seconds: float, *, lower: float = 0, number: int = 0) -> list[int]:
    """Return the colour on the lanes' canvas at a moment of a lane, `lower` pixels under the lane's middle."""
    data: list[int] = page.evaluate(
        """([number, lane, seconds, lower]) => {
            const { x, canvasY } = penstock.place(number, lane, seconds);
            const canvas = document.querySelectorAll(".lanes canvas")[number];
            const left = x - canvas.getBoundingClientRect().left;
            return [...canvas.getContext("2d").getImageData(Math.floor(left), Math.floor(canvasY + lower), 1, 1).data];
        }""",
        [number, lane, seconds, lower],
    )
    return data


def colour(page: Page, name: str) -> list[int]:
    text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)] + [255]


def view(page: Page) -> tuple[float, ...]:
    """Return the stretch of time on show, once the page has drawn it."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return tuple(page.evaluate("[penstock.view.start, penstock.view.end]"))


def hover(page: Page, lane: int, seconds: float) -> str:
    at = page.evaluate("([lane, seconds]) => penstock.place(0, lane, seconds)", [lane, seconds])
    page.mouse.move(at["x"], at["y"])
    return page.locator("#tooltip").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_span_has_its_kinds_colour_where_it_lies(open_page: Open, step: Timeline, scheme: str) -> None:
    page = open_page(step, scheme=scheme)
    for text in ("0F3", "5I7", "7W15"):
        lane, start, end = find(step, text)
        assert pixel(page, lane, start + (end - start) * 0.12) == colour(page, f"kind-{text[1]}")
    assert pixel(page, 7, 1.7) == colour(page, "lane")  # a bubble


def test_the_page_holds_every_span_from_the_steps_start_on(open_page: Open, step: Timeline) -> None:
    page = open_page(replace(step, start=step.start + 1e3, end=step.end + 1e3))
    spans = page.evaluate(
        """() => {
            const { spans } = penstock.timelines[0];
            return ["kind", "stage", "mb", "toLane", "start", "end"].map((name) => [...spans[name]]);
        }"""
    )
    shown = sorted(zip(*spans, strict=True))
    columns = (step.kind, step.stage, step.mb, step.to_lane + 1, step.start, step.end)
    expected = sorted(zip(*(column.tolist() for column in columns), strict=True))
    np.testing.assert_allclose(np.array(shown), np.array(expected), atol=step.step_seconds * 1e-9)


def test_the_bubble_over_time_adds_up_to_the_bubble(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    busy = page.evaluate("penstock.timelines[0].compute.total.at(-1)")
    assert 1 - busy / (step.num_lanes * step.step_seconds) == pytest.approx(step.bubble)


def test_the_header_names_the_figures(open_page: Open, step: Timeline) -> None:
    head = open_page(step).locator(".head").inner_text()
    figures = ("57.8 s", "bubble of the makespan", "bubble of the longest lane span", "17.0 %", "8.25 GiB")
    assert [figure for figure in (*figures, "peak saved stage micro-batches") if figure not in head] == []


def test_without_bytes_the_curves_count_stage_micro_batches(open_page: Open) -> None:
    page = open_page(simulate(zb_h1(lanes=4, micro_batches=8), Costs(forward=1, input_grad=1, weight_grad=1)))
    assert "peak bytes" not in page.locator(".head").inner_text()
    assert page.locator(".memory h3").inner_text() == "stage micro-batches held by each lane"
    assert page.locator("#legend button").all_inner_texts() == ["F forward", "I input gradient", "W weight gradient"]


def test_hover_tells_the_action(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    lane, start, end = find(step, "5I7")
    shown = hover(page, lane, (start + end) / 2).split()
    assert shown[:3] == ["5I7", "input", "gradient"]
    assert shown[3:9] == ["lane", "5", "stage", "5", "micro-batch", "7"]
    assert shown[-3:] == ["duration", "1", "s"]
    assert "no compute for" in hover(page, 7, 1.7)


def test_hover_tells_a_transfers_way(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    lane, start, end = find(step, "2SEND_F0")
    at = page.evaluate("([lane, seconds]) => penstock.place(0, lane, seconds)", [lane, (start + end) / 2])
    tall = page.evaluate("document.querySelector('.lanes').offsetHeight") / (step.num_lanes + 1)
    for y in np.arange(at["y"], at["y"] + tall):  # down through the lane until its strip is met
        page.mouse.move(at["x"], float(y))
        if (shown := page.locator("#tooltip").inner_text()).startswith("2SEND_F0"):
            break
    assert "lane 2 → lane 3" in shown
    assert "send of an activation" in shown


def test_hover_on_the_curves_tells_memory_and_bubble(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    page.locator(".memory").hover(position={"x": 700, "y": 14})
    assert "lane 0" in page.locator("#tooltip").inner_text()
    assert "GiB" in page.locator("#tooltip").inner_text()
    page.locator(".bubble").hover(position={"x": 190, "y": 30})
    assert "7 of 8" in page.locator("#tooltip").inner_text()


def test_wheel_zooms_around_the_cursor_and_double_click_resets(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    whole = view(page)
    hover(page, 3, 20.0)
    before = page.evaluate("penstock.place(0, 3, 20.0).x")
    page.mouse.wheel(0, -400)
    start, end = view(page)
    assert whole[0] < start < 20 < end < whole[1]
    assert page.evaluate("penstock.place(0, 3, 20.0).x") == pytest.approx(before, abs=1)
    page.locator(".lanes").dblclick(position={"x": 600, "y": 100})
    assert view(page) == whole


def test_drag_pans(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    page.evaluate("penstock.view.show(20, 10); penstock.draw()")
    hover(page, 3, 25.0)
    at = page.evaluate("penstock.place(0, 3, 25.0)")
    page.mouse.down()
    page.mouse.move(at["x"] + 200, at["y"], steps=4)
    page.mouse.up()
    start, end = view(page)
    assert start < 19
    assert end - start == pytest.approx(10)
    assert page.evaluate("penstock.place(0, 3, 25.0).x") == pytest.approx(at["x"] + 200, abs=1)


def test_keys_and_buttons_move_the_view(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    whole = view(page)
    page.keyboard.press("+")
    near = view(page)
    assert near[1] - near[0] < whole[1]
    page.keyboard.press("ArrowRight")
    assert view(page)[0] > near[0]
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert view(page) == whole
    page.get_by_label("Zoom in").click()
    assert view(page) != whole
    page.get_by_label("Show the whole step").click()
    assert view(page) == whole


def test_the_legend_hides_a_kind(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    lane, start, _ = find(step, "0F3")
    button = page.get_by_role("button", name="F: forward")
    button.click()
    view(page)
    assert button.get_attribute("aria-pressed") == "false"
    assert pixel(page, lane, start + 0.5) == colour(page, "lane")
    assert "0F3" not in hover(page, lane, start + 0.5)


def test_a_click_follows_a_micro_batch(open_page: Open, step: Timeline) -> None:
    page = open_page(step)
    lane, start, _ = find(step, "5I7")
    hover(page, lane, start + 0.5)
    page.mouse.down()
    page.mouse.up()
    view(page)
    assert pixel(page, lane, start + 0.12) == colour(page, f"kind-{Kind.I}")
    other, other_start, _ = find(step, "0F3")
    assert pixel(page, other, other_start + 0.12) != colour(page, f"kind-{Kind.F}")
    page.keyboard.press("Escape")
    view(page)
    assert pixel(page, other, other_start + 0.12) == colour(page, f"kind-{Kind.F}")


def test_actions_that_overlap_share_the_lanes_height(open_page: Open) -> None:
    pair = simulate(dualpipe(lanes=8, micro_batches=20), COSTS)
    page = open_page(pair)
    lane, start, end = find(pair, "0F14")
    at = start + (end - start) * 0.05
    upper, lower = pixel(page, lane, at, lower=-6), pixel(page, lane, at, lower=6)
    assert upper == colour(page, f"kind-{Kind.F}")
    assert lower != upper
    assert lower != colour(page, "lane")


def test_comparison_shows_both_names_and_the_ratio(open_page: Open, step: Timeline, slower: Timeline) -> None:
    page = open_page(slower, step)
    assert page.locator("h2").all_inner_texts() == ["1f1b", "zb_h1"]
    assert page.locator(".ratio").all_inner_texts() == ["1.26 × the step time of zb_h1", "the shortest step"]
    assert page.title() == "1f1b · zb_h1 · Penstock timeline"
    assert view(page) == pytest.approx((0, slower.step_seconds))
    lane, start, _ = find(step, "0F3")
    assert pixel(page, lane, start + 0.12, number=1) == colour(page, f"kind-{Kind.F}")


def test_three_timelines_of_the_same_name_are_numbered(open_page: Open, step: Timeline, slower: Timeline) -> None:
    page = open_page(step, slower, step)
    assert page.locator("h2").all_inner_texts() == ["zb_h1 (1)", "1f1b", "zb_h1 (2)"]
    assert page.locator(".ratio").all_inner_texts()[2] == "the same step time as zb_h1 (1)"


@pytest.fixture(scope="module")
def measured() -> Timeline:
    """A step as measured: a slow stage, slow transfers, on a clock that began long ago, and every action late."""
    lowered = lower(build_1f1b(lanes=4, micro_batches=8))
    step = simulate(lowered, replace(COSTS, forward=[1, 1, 1.5, 1], transfer=0.4))
    start, end = (1e5 + 1.1 * moments for moments in (step.start, step.end))
    start = np.where(step.to_lane < 0, start + 0.1 * (step.end - step.start), start)
    late = replace(step, start=start, end=end, is_measured=True)
    return replace(late, causes=find_causes(late, lowered))


@pytest.fixture(scope="module")
def predicted() -> Timeline:
    lowered = lower(build_1f1b(lanes=4, micro_batches=8))
    step = simulate(lowered, COSTS)
    return replace(step, causes=find_causes(step, lowered))


def cells(page: Page, table: str) -> list[list[str]]:
    rows = page.locator(f"{table} tr")
    return [rows.nth(row).locator("th, td").all_inner_texts() for row in range(rows.count())]


def test_measured_and_predicted_are_told_apart_on_one_scale(
    open_page: Open, measured: Timeline, predicted: Timeline
) -> None:
    page = open_page(measured, predicted)
    assert page.locator("h2").all_inner_texts() == ["1f1b, measured", "1f1b, predicted"]
    ratio = measured.step_seconds / predicted.step_seconds
    bubbles = f"{100 * measured.bubble:.1f} %, predicted {100 * predicted.bubble:.1f} %"
    assert page.locator(".ratio").all_inner_texts() == [
        f"{ratio:.2f} × the predicted step time; bubble {bubbles}",
        "the prediction",
    ]
    assert view(page) == pytest.approx((0, measured.step_seconds))
    lane, start, end = find(predicted, "3B7")
    assert pixel(page, lane, (start + 9 * end) / 10, number=1) == colour(page, f"kind-{Kind.B}")
    same_x = "[0, 1].map((number) => penstock.place(number, 0, 7).x)"
    assert len(set(page.evaluate(same_x))) == 1  # a moment of both lies on one line
    lane, start, end = find(measured, "3B7")
    assert pixel(page, lane, (start + 9 * end) / 10 - measured.start.min()) == colour(page, f"kind-{Kind.B}")


def test_causes_stand_beside_those_of_the_prediction(open_page: Open, measured: Timeline, predicted: Timeline) -> None:
    page = open_page(measured, predicted)
    assert page.locator(".causes .bar").count() == 2
    assert page.locator(".causes table").count() == 1
    heading, *rows = cells(page, ".causes")
    assert heading[:4] == ["cause of the bubble", "share of lanes × makespan", "predicted", "time per step"]
    assert [row[0] for row in rows] == ["warm-up and cool-down", "imbalance", "transfers", "runtime overhead"]
    mine, theirs = (sum(float(row[column].split()[0]) for row in rows) for column in (1, 2))
    assert mine == pytest.approx(100 * measured.bubble, abs=0.2)
    assert theirs == pytest.approx(100 * predicted.bubble, abs=0.2)
    assert min(float(row[1].split()[0]) for row in rows) > 0
    assert rows[3][2:4] == ["0.0 %", f"{measured.causes.overhead * measured.step_seconds:.2f} s"]  # type: ignore[union-attr]
    parts = page.locator(".causes .bar").first.locator("span")
    widths = [parts.nth(part).bounding_box()["width"] for part in range(parts.count())]  # type: ignore[index]
    assert widths[0] / sum(widths) == pytest.approx(1 - measured.bubble, abs=0.02)


def seconds_of(text: str) -> float:
    """Return the seconds of a figure of the page, as "+3.5 ms" or "−700 µs"."""
    number, unit = text.replace("−", "-").replace("+", "").split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


@pytest.mark.parametrize("has_causes", [True, False])
def test_a_step_that_took_longer_than_predicted_is_explained(
    open_page: Open, measured: Timeline, predicted: Timeline, has_causes: bool
) -> None:
    """Only the bubble was split: of actions that took longer than predicted nothing was said."""
    pair = (measured, predicted) if has_causes else (replace(measured, causes=None), replace(predicted, causes=None))
    page = open_page(*pair)
    said = page.locator("p.difference").inner_text()
    longer = measured.step_seconds - predicted.step_seconds
    assert said.startswith(f"The step took {longer:.1f} s longer than predicted. Mean over lanes: actions +")
    assert "(most in F on lane 2: +" in said  # whose forwards take 1.5 for 1
    assert ("runtime overhead +" in said) == has_causes
    page.locator(".difference summary").click()
    heading, *rows = cells(page, "details.difference")
    assert heading == [
        *("mean over lanes", "predicted", "measured", "difference", "ratio"),
        *map("lane {}".format, range(4)),
    ]
    *parts, step = rows
    assert [row[0] for row in parts[:2]] == ["F forward", "B full backward"]
    for column in (1, 2, 3, 5, 6, 7, 8):  # parts add up to the step, on every lane
        assert sum(seconds_of(row[column]) for row in parts) == pytest.approx(
            seconds_of(step[column]), abs=0.15
        )  # figures have three digits
    assert seconds_of(step[3]) == pytest.approx(longer, abs=0.06)
    forwards = (
        sum(span.end - span.start for span in measured if span.action.kind is Kind.F and span.lane == 2)
        - predicted.num_lanes * 2
    )  # eight forwards of a second
    assert seconds_of(parts[0][7]) == pytest.approx(forwards, abs=0.02)


def test_there_is_nothing_to_explain_without_a_prediction(
    open_page: Open, measured: Timeline, predicted: Timeline, step: Timeline, slower: Timeline
) -> None:
    for shown in ([measured], [step, slower], [measured, step]):  # the last two differ in lanes
        assert open_page(*shown).locator(".difference").count() == 0


def test_hover_tells_what_was_predicted(open_page: Open, measured: Timeline, predicted: Timeline) -> None:
    page = open_page(measured, predicted)
    begin = measured.start.min()
    lane, start, end = find(measured, "2F3")
    _, before, after = find(predicted, "2F3")
    said = hover(page, lane, (start + end) / 2 - begin)
    assert f"predicted\n{after - before:g} s ({(end - start) / (after - before):.2f} ×)" in said
    assert "predicted" not in hover(open_page(measured), lane, (start + end) / 2 - begin)


def test_lanes_are_taller_than_the_curves(open_page: Open) -> None:
    for lanes in (1, 2, 4):
        page = open_page(simulate(build_1f1b(lanes=lanes, micro_batches=4), COSTS))
        tall = [page.locator(f".panel.{name}").bounding_box()["height"] for name in ("lanes", "memory", "bubble")]  # type: ignore[index]
        assert tall[0] > max(tall[1:])


@pytest.mark.parametrize(("stages", "words"), [(1, None), (2, "1st, 2nd stage"), (3, "1st to 3rd stage")])
def test_the_legend_has_the_shades_of_stages(open_page: Open, stages: int, words: str | None) -> None:
    """A second stage's paler colour was not in the legend."""
    page = open_page(simulate(build("interleaved_1f1b", lanes=2, micro_batches=4, stages_per_lane=stages), COSTS))
    if words is None:
        assert page.locator(".shades").count() == 0
        return
    assert page.locator(".shades").inner_text() == f"{words} of a lane"
    swatches = page.locator(".shades .swatch").evaluate_all(
        "(all) => all.map((s) => getComputedStyle(s).backgroundColor)"
    )
    drawn = page.evaluate("penstock.shades(0)")
    as_rgb = [[round(255 * float(part)) for part in re.findall(r"[\d.]+", text)[:3]] for text in swatches]
    for swatch, lane_colour in zip(as_rgb, drawn, strict=True):
        assert swatch == pytest.approx(lane_colour, abs=1.5)


def test_causes_of_each_lane_stand_in_its_figures(open_page: Open, measured: Timeline) -> None:
    page = open_page(measured)
    assert page.locator("h2").all_inner_texts() == ["1f1b, measured"]
    assert page.locator(".ratio").count() == 0
    assert cells(page, ".causes")[0][1:3] == ["share of lanes × makespan", "time per step"]
    page.locator("summary").click()
    heading, *rows = cells(page, "details")
    assert heading[2:8] == [
        *("warm-up and cool-down", "imbalance", "transfers", "runtime overhead"),
        *("waited for transfers", "idle but ready"),
    ]
    for row, bubble in zip(rows, measured.lane_bubbles, strict=True):
        assert sum(float(cell.split()[0]) for cell in row[2:6]) == pytest.approx(100 * bubble, abs=0.3)


def test_without_causes_there_is_no_table(open_page: Open, measured: Timeline, predicted: Timeline) -> None:
    page = open_page(replace(measured, causes=None), replace(predicted, causes=None))
    assert page.locator(".causes").count() == 0
    assert "predicted step time" in page.locator(".ratio").first.inner_text()


def test_sends_whose_end_is_not_known_and_waits_are_drawn(open_page: Open, measured: Timeline) -> None:
    is_send = measured.to_lane >= 0
    first = np.flatnonzero(is_send)[:3]
    end = measured.end.copy()
    end[first] = np.nan
    page = open_page(replace(measured, end=end))
    assert page.evaluate("penstock.timelines[0].spans.end.every(Number.isFinite)")
    assert page.evaluate("penstock.timelines[0].stepSeconds") == pytest.approx(measured.step_seconds)
    assert "SEND_F" in page.locator("#legend").inner_text()
    page = open_page(replace(measured, end=np.where(is_send, np.nan, measured.end)))
    assert "SEND_F" not in page.locator("#legend").inner_text()  # no send has a length to draw


def test_a_hostile_name_is_only_text(open_page: Open, step: Timeline) -> None:
    page = open_page(replace(step, name=HOSTILE), replace(step, name="plain"))
    assert page.locator("h2").first.text_content() == HOSTILE
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_the_policy_forbids_the_network(browser: Browser, step: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_html([step], path)
    page = browser.new_page()
    page.goto(path.as_uri())
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    page.close()
    assert asked == []


def test_a_hundred_thousand_spans_stay_few_rectangles_at_every_zoom(open_page: Open, tmp_path: Path) -> None:
    big = simulate(zb_h1(lanes=64, micro_batches=320), COSTS)
    assert len(big) > 100_000
    page = open_page(big)
    assert (tmp_path / "page.html").stat().st_size < 4_000_000
    for zoom in (1, 3, 10, 20, 30, 50, 100, 1000):
        page.evaluate("(seconds) => { penstock.view.show(300, seconds); penstock.draw(); }", big.step_seconds / zoom)
        stats = page.evaluate("penstock.stats")
        assert 64 <= stats["lastDrawRects"] <= 10 * WIDTH
        middle = sum(page.evaluate("[penstock.view.start, penstock.view.end]")) / 2
        assert pixel(page, 2, middle) != colour(page, "lane")
    assert stats["isDense"] == [False]


def test_averaged_columns_have_the_colour_of_a_lone_kind(open_page: Open) -> None:
    big = simulate(zb_h1(lanes=64, micro_batches=320), COSTS)
    page = open_page(big)
    assert page.evaluate("penstock.stats.isDense") == [True]
    assert pixel(page, 0, 30.0) == colour(page, f"kind-{Kind.F}")
    assert pixel(page, 0, 100.0) == colour(page, "lane")


def test_a_step_of_no_seconds_opens(open_page: Open) -> None:
    page = open_page(simulate(build_1f1b(lanes=2, micro_batches=2), Costs(forward=0, input_grad=0, weight_grad=0)))
    assert "0 s" in page.locator(".head").inner_text()


def test_to_html_writes_the_page(step: Timeline, slower: Timeline, tmp_path: Path) -> None:
    step.to_html(tmp_path / "step.html", compare=slower)
    assert "http://" not in (tmp_path / "step.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("where", ["missing/page.html", "folder", "file/page.html"])
def test_a_page_that_cannot_be_written_leaves_nothing_behind(step: Timeline, tmp_path: Path, where: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match="cannot be written"):
        write_html([step], tmp_path / where)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_to_draw_is_said(step: Timeline, tmp_path: Path) -> None:
    columns = ("kind", "stage", "mb", "lane", "to_lane", "start", "end")
    empty = replace(step, name="nothing", **{name: getattr(step, name)[:0] for name in columns})
    with pytest.raises(UsageError, match="at least one"):
        write_html([], tmp_path / "page.html")
    with pytest.raises(UsageError, match="no spans in nothing"):
        write_html([step, empty], tmp_path / "page.html")
