"""The demo: it trains, writes and draws, in a terminal and elsewhere; Ctrl-C ends it; nothing wrong gets far."""

import json
import math
import re

import pytest
import torch

from commands import penstock
from penstock.cli.demo_training import BATCH_SIZE, LENGTH, PROMPT, Settings, compare_with_plain, open_training
from penstock.launch.build.small_gpt import load_text
from terminals import in_terminal, plain


def demo(*words):
    return penstock("demo", *words)


def test_it_trains_and_says_so_line_by_line(tmp_path):
    code, out, _ = demo("--steps", 12, "--folder", tmp_path / "new" / "folder")
    assert code == 0
    losses = [
        float(loss) for loss in re.findall(r"^step +\d+ of 12: loss ([\d.]+), [\d,]+ tokens/s, bubble", out, re.M)
    ]
    assert losses[-1] < losses[0] < 5
    for words in ("on 2 lanes", "schedule 1f1b", "stage 1 on lane 1", "The model writes", PROMPT, "predicted: step"):
        assert words in out
    # the demo never said what the same batch takes without a pipeline
    said = re.search(
        r"^The plain model takes .* per step with 2 threads; the pipeline takes .* with 1 thread per", out, re.M
    )
    assert said is not None
    page = (tmp_path / "new" / "folder" / "timelines.html").read_text()
    assert "1f1b, measured" in page
    assert "1f1b, predicted" in page
    trace = json.loads((tmp_path / "new" / "folder" / "measured.json").read_text())
    assert trace["traceEvents"]
    assert str(tmp_path / "new" / "folder" / "timelines.html") in out.replace("\n", "")


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved_1f1b", "pipedream_2bw"])
def test_it_trains_with_other_schedules(schedule, tmp_path):
    code, out, _ = demo("--steps", 6, "--schedule", schedule, "--micro-batches", 4, "--json", "--folder", tmp_path)
    assert code == 0
    figures = json.loads(out)
    assert (figures["schedule"], figures["lanes"], figures["micro_batches"]) == (schedule, 2, 4)
    assert len(figures["cuts"]) == figures["stages"] - 1
    assert len(figures["losses"]) == 6
    assert all(map(math.isfinite, figures["losses"]))
    assert figures["losses"][-1] < figures["losses"][0]
    for step in (figures["measured"], figures["predicted"]):
        assert step["step_seconds"] > 0
        assert 0 <= step["bubble_over_makespan"] < 1
    assert set(figures["compared"]) == {"plain_seconds", "pipeline_seconds"}
    assert min(figures["compared"].values()) > 0
    assert len(figures["text"]) == 300
    assert {path.name for path in tmp_path.iterdir()} == {"timelines.html", "measured.json"}
    assert set(figures["written"].values()) == {str(path) for path in tmp_path.iterdir()}


@pytest.mark.parametrize(("schedule", "has_updates"), [("1f1b", False), ("pipedream_2bw", True)])
def test_the_plain_step_does_the_work_of_the_pipelines_step(schedule, has_updates):
    """The same batch, as many threads in total, and an update exactly where the pipeline's step has one."""
    seen = []

    class Noted(torch.nn.Linear):
        def forward(self, x):
            seen.append((len(x), torch.get_num_threads()))
            return super().forward(x)

    settings = Settings(2, schedule, lanes=2, micro_batches=4)
    with open_training(settings, progress=lambda *_: None) as training, pytest.MonkeyPatch.context() as patch:
        model = torch.nn.Sequential(torch.nn.Embedding(100, 8), Noted(8, 100))
        before = model[1].weight.detach().clone()
        patch.setattr("penstock.cli.demo_training.make_gpt", lambda *_, **__: model)
        found = compare_with_plain(training)
        assert torch.get_num_threads() == 1
    assert set(seen) == {(BATCH_SIZE, 2)}
    assert torch.equal(model[1].weight, before) is not has_updates
    assert min(found.plain_seconds, found.pipeline_seconds) > 0


def test_a_schedule_of_ones_own_brings_its_lanes_and_micro_batches(tmp_path):
    penstock("simulate", "--schedule", "gpipe", "--lanes", 3, "--micro-batches", 5, "--csv", tmp_path / "s.csv")
    code, out, _ = demo("--steps", 2, "--schedule", tmp_path / "s.csv", "--json", "--folder", tmp_path)
    assert code == 0
    assert (json.loads(out)["lanes"], json.loads(out)["micro_batches"]) == (3, 5)


@pytest.mark.full
def test_the_first_losses_do_not_depend_on_the_lanes(tmp_path):
    losses = [
        json.loads(demo("--steps", 3, "--lanes", lanes, "--json", "--folder", tmp_path)[1])["losses"]
        for lanes in (1, 2)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_it_still_compares_schedules(tmp_path):
    code, out, _ = demo("--simulate", "--lanes", 2, "--micro-batches", 3, "--folder", tmp_path)
    assert code == 0
    assert "zb_v" in out
    assert {path.name for path in tmp_path.iterdir()} == {"timelines.html", "auto.json"}
    code, out, _ = demo("--simulate", "--lanes", 2, "--micro-batches", 3, "--folder", tmp_path, "--json")
    assert [row["schedule"] for row in json.loads(out)["schedules"]][:2] == ["1f1b", "interleaved_1f1b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batches", BATCH_SIZE + 1], "a batch has 32 samples"),
        (["--schedule", "1f1bb"], "unknown schedule '1f1bb'"),
        (
            ["--simulate", "--steps", 3, "--schedule", "1f1b"],
            "--steps and --schedule: not allowed with --simulate",
        ),
        (["--schedule", "no.csv"], "no.csv: cannot be read"),
        (["--schedule", "dualpipe", "--lanes", 3], "must be even"),
        (["--lanes", 1000], "request fewer stages"),
    ],
)
def test_wrong_input_gets_one_message(words, message, tmp_path):
    code, _, err = demo(*words, "--folder", tmp_path)
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = demo("--folder", tmp_path / "file" / "x")
    assert code == 2
    assert "cannot be created" in err


def test_a_terminal_sees_figures_lanes_and_a_bar(tmp_path):
    code, out = in_terminal("demo", "--steps", 12, "--folder", tmp_path)
    assert code == 0
    shown = plain(out)
    for words in ("tokens/s", "lane 1 ", "forward", "/12 steps", "to go", "The model writes"):
        assert words in shown
    assert out.rindex("\033[?25h") > out.rindex("\033[?25l")  # the cursor is back


def test_ctrl_c_ends_it(tmp_path):
    code, out = in_terminal("demo", "--steps", 100_000, "--folder", tmp_path, stop_at="to go")
    assert code == 130
    assert out.endswith("Stopped by Ctrl-C; nothing was written.\r\n")
    assert "Traceback" not in out
    assert out.rindex("\033[?25h") > out.rindex("\033[?25l")
    assert not list(tmp_path.iterdir())


def test_the_text_is_fit_to_learn_from():
    text = load_text()
    assert text.content.isascii()
    assert len(text.content) > 20_000
    lines = [line for line in text.content.splitlines() if line]
    assert len(set(lines)) == len(lines)
    assert len(PROMPT) == LENGTH
    assert text.write(text.read(PROMPT).tolist()) == PROMPT
