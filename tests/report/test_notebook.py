"""Notebooks: what a cell shows for a plan, an explanation, a timeline and a recording."""

import html
import re
from dataclasses import replace

import pytest

import penstock
from penstock.deciding.plan import Plan
from penstock.report import timeline as timeline_module
from pipelines import data, sequence


def page_in(shown):
    """Return the page in a frame, whose attributes are complete."""
    found = re.fullmatch(r'<iframe sandbox="allow-scripts" style="[^"<>]*" srcdoc="([^"<>]*)"></iframe>', shown)
    return html.unescape(found[1])


def simulated():
    return penstock.simulate(penstock.schedules.build("1f1b", lanes=2, micro_batches=4))


def test_a_timeline_is_the_page_that_to_html_writes(tmp_path):
    timeline = simulated()
    timeline.to_html(tmp_path / "page.html")
    assert page_in(timeline._repr_html_()) == (tmp_path / "page.html").read_text()


def test_a_very_long_timeline_is_its_name(monkeypatch):
    monkeypatch.setattr(timeline_module, "_MOST_SPANS_OF_A_CELL", 10)
    assert simulated()._repr_html_() == f"<pre>{html.escape(repr(simulated()))}</pre>"


def test_a_plan_is_its_explanation_or_its_text(tmp_path):
    x, _ = data(4)
    plan = penstock.plan(sequence(4), example=x, lanes=2)
    plan.explain().to_html(tmp_path / "page.html")
    assert page_in(plan._repr_html_()) == (tmp_path / "page.html").read_text()
    assert page_in(plan.explain()._repr_html_()) == (tmp_path / "page.html").read_text()
    plain = Plan(plan.schedule, plan.cuts)
    assert plain._repr_html_() == f"<pre>{plain}</pre>"


def test_a_recording_is_its_last_timeline():
    x, target = data(4)
    with penstock.Pipeline(sequence(4), example=x, loss=lambda a, b: (a - b).square().mean(), lanes=2) as pipe:
        with pipe.record() as recording:
            assert "nothing yet" in recording._repr_html_()
            pipe.step(x, target)
        assert recording._repr_html_() == recording.timeline._repr_html_()


def test_the_frame_draws_the_page():
    from browser import open_browser

    with open_browser() as browser:
        tab = browser.new_page()
        faults = []
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        tab.set_content(f"<body>{simulated()._repr_html_()}</body>")
        inside = tab.frames[1]
        inside.wait_for_selector("canvas")
        assert "1f1b" in inside.inner_text("body")
        assert not faults


@pytest.mark.parametrize("text", ["</iframe><script>", '" onload="'])
def test_a_name_cannot_leave_the_frame(text):
    shown = replace(simulated(), name=text)._repr_html_()
    assert text not in shown.removesuffix("</iframe>")
    assert page_in(shown)
