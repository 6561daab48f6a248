"""The command line: what it prints and writes, and what it says to wrong input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import penstock
from penstock.schedules import load_csv, names


def test_simulate_prints_a_table_and_a_chart():
    code, out, _ = penstock(
        "simulate", "--schedule", "zb_v", "--lanes", "4", "--micro-batches", "6", "--compare", "1f1b,gpipe"
    )
    assert code == 0
    for word in ("zb_v", "1f1b", "gpipe", "makespan", "lane 3", "longest lane span"):
        assert word in out


def test_simulate_json_has_the_figures():
    code, out, _ = penstock("simulate", "--schedule", "1f1b", "--lanes", "4", "--micro-batches", "8", "--json")
    assert code == 0
    (row,) = json.loads(out)["schedules"]
    assert row["step_seconds"] == 33.0
    assert row["bubble_over_makespan"] == pytest.approx(3 / 11)
    assert row["peak_saved_stage_micro_batches"] == [4, 3, 2, 1]


def test_a_schedule_that_is_named_twice_is_shown_once():
    code, out, _ = penstock("simulate", "--schedule", "1f1b", "--compare", "gpipe,1f1b,gpipe", "--json")
    assert code == 0
    assert [row["schedule"] for row in json.loads(out)["schedules"]] == ["1f1b", "gpipe"]


def test_table_and_charts_count_what_is_held_in_one_unit():
    """The table said 4 and the chart 8 for one schedule: micro-batches, and stage micro-batches of half a lane."""
    code, out, _ = penstock("simulate", "--schedule", "zb_v", "--compare", "1f1b,interleaved_1f1b", "--json")
    assert code == 0
    assert [row["peak_micro_batches"] for row in json.loads(out)["schedules"]] == [4, 4, 5.5]
    code, out, _ = penstock("simulate", "--schedule", "zb_v", "--compare", "1f1b,interleaved_1f1b")
    assert code == 0
    rows = re.findall(r"^ *(\w+) +[\d.]+ s +[\d.]+ % +[\d.]+ % +([\d.]+)", out, re.M)
    charts = re.findall(r"^(\w+): step .*, peak held: ([\d.]+) micro-batches of 1/4 of the model$", out, re.M)
    assert rows == charts == [("zb_v", "4"), ("1f1b", "4"), ("interleaved_1f1b", "5.5")]
    assert "a micro-batch counts as 1 if 1/4 of the model holds its activations" in out


def test_a_lanes_costs_are_shared_by_its_stages():
    code, out, _ = penstock(
        "simulate", "--schedule", "zb_v", "--compare", "1f1b", "--forward", "2", "--saved-bytes", "1KiB", "--json"
    )
    assert code == 0
    rows = json.loads(out)["schedules"]
    work = [4 * row["step_seconds"] * (1 - row["bubble_over_makespan"]) for row in rows]
    assert work[0] == pytest.approx(work[1])
    assert max(rows[0]["peak_bytes"]) == max(rows[1]["peak_bytes"]) == 4096


def test_simulate_writes_what_is_asked_for(tmp_path):
    page, trace, table = (tmp_path / name for name in ("s.html", "s.json", "s.csv"))
    code, out, _ = penstock(
        "simulate", "--schedule", "zb_h1", "--html", str(page), "--chrome", str(trace), "--csv", str(table)
    )
    assert code == 0
    assert "<canvas" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert load_csv(table).num_lanes == 4
    assert str(page) in out.replace("\n", "")
    code, out, _ = penstock("simulate", "--schedule", str(table), "--json")
    assert code == 0
    assert json.loads(out)["schedules"][0]["schedule"] == "s"


def test_list_describes_every_schedule():
    code, out, _ = penstock("simulate", "--list")
    assert code == 0
    assert all(name in out for name in names() if name != "one_by_one")
    code, out, _ = penstock("simulate", "--list", "--json")
    assert {"name", "summary", "paper", "options"} == set(json.loads(out)[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lanes", "0"], "lanes: 0 must be a whole number"),
        (["--lanes", "-3"], "lanes: -3 must be a whole number"),
        (["--micro-batches", "0"], "micro_batches: 0"),
        (["--schedule", "zb_v3"], "Did you mean 'zb_v'"),
        (["--compare", "1f1c,gpip"], "Did you mean '1f1b'"),
        (["--compare", "1f1c,gpip"], "Did you mean 'gpipe'"),
        (["--forward", "1e31"], "must be finite"),
        (["--pending-bytes", "1"], "--pending-bytes needs --saved-bytes"),
        (["--backward", "1", "--weight-grad", "2"], "is more than backward"),
        (["--lanes", "100000", "--micro-batches", "100000"], "too many actions"),
        (["--two-ways"], "only applies to auto"),
        (["--schedule", "auto", "--stages-per-lane", "0"], "stages_per_lane: 0"),
        (["--memory-limit", "1", "--saved-bytes", " "], "--memory-limit needs --saved-bytes"),
        (["--saved-bytes", "1bb"], "is not a number"),
        (["--html", ""], "it is a directory"),
        (["--html", "x.html", "--csv", "x.html"], "the same path"),
        (["--compare", "zb_v", "--forward", "1,1,1,1"], "zb_v: costs must be"),
        (["--schedule", "chimera", "--lanes", "5"], "use 4 or 6"),
        (["--schedule", "1f1b", "--stages-per-lane", "2"], "leave stages_per_lane out"),
        (["--schedule", "interleaved_1f1b", "--stages-per-lane", "0"], "stages_per_lane: 0"),
        (["--forward", "nan"], "forward: nan must be finite"),
        (["--forward", "-1"], "forward: -1.0 must be finite and not negative"),
        (["--forward", "1,2"], "one per stage (4 stages)"),
        (["--forward", "one"], "--forward: 'one' is not a number"),
        (["--transfer", "inf"], "transfer: inf must be finite"),
        (["--keep", "hodl"], "Did you mean 'hold'"),
        (["--memory-limit", "1GiB"], "--memory-limit needs --saved-bytes"),
        (["--memory-limit", "1KiB", "--saved-bytes", "1KiB"], "its peak is"),
        (["--memory-limit", "0", "--saved-bytes", "1KiB"], "must be above 0"),
        (["--schedule", "auto", "--memory-limit", "1KiB", "--saved-bytes", "2KiB"], "no schedule fits"),
        (["--schedule", "none.csv"], "none.csv: cannot be read"),
        (["--html", "/no/such/folder/x.html"], "cannot be written"),
    ],
)
def test_wrong_input_gets_one_message_and_exit_code_2(words, message):
    code, out, err = penstock("simulate", *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_a_malformed_csv_names_its_line(tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,oops\n")
    code, _, err = penstock("simulate", "--schedule", str(tmp_path / "bad.csv"))
    assert code == 2
    assert "line 2, cell 2" in err


def test_a_schedule_in_a_comparison_that_does_not_fit_is_marked():
    words = ["--schedule", "auto", "--memory-limit", "3GiB", "--saved-bytes", "1GiB", "--compare", "1f1b"]
    code, out, _ = penstock("simulate", *words)
    assert code == 0
    assert "1f1b: exceeds the memory limit" in out
    code, out, _ = penstock("simulate", *words, "--json")
    assert [row["fits_memory_limit"] for row in json.loads(out)["schedules"]] == [True, False]


def test_the_memory_limit_knows_what_is_kept():
    """The story: recompute was refused for what holding would have taken."""
    words = ["--schedule", "gpipe", "--saved-bytes", "1GiB", "--memory-limit", "2GiB"]
    assert penstock("simulate", *words)[0] == 2
    assert penstock("simulate", *words, "--keep", "recompute")[0] == 0


@pytest.mark.parametrize("keep", ["hold", "recompute", "offload"])
def test_auto_fits_whatever_is_kept(keep):
    """The story: with recompute the limit was left out of the search, and what came of it was refused."""
    words = ["--schedule", "auto", "--lanes", "2", "--saved-bytes", "1GiB", "--memory-limit", "1GiB", "--keep", keep]
    code, out, err = penstock("simulate", *words, "--json")
    assert code == 0, err
    assert json.loads(out)["schedules"][0]["fits_memory_limit"]


def test_outputs_go_where_they_are_sent(tmp_path):
    """The story: /dev/stdout into a pipe was not found; a link that leads to itself was a traceback."""
    run = [sys.executable, "-c", "from penstock.cli.main import run; run()", "simulate", "--json", "--csv"]
    piped = subprocess.run([*run, "/dev/stdout"], capture_output=True, text=True, check=False)
    assert piped.returncode == 0
    assert "0F0,0F1" in piped.stdout
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    looped = subprocess.run([*run, str(tmp_path / "a")], capture_output=True, text=True, check=False)
    assert looped.returncode == 2
    assert "Too many levels of symbolic links" in looped.stderr
    assert looped.stderr.count("\n") == 1


def test_seconds_have_units():
    """The story: 10m was read as ten million."""
    _, out, _ = penstock("simulate", "--forward", "10ms", "--json")
    assert json.loads(out)["schedules"][0]["step_seconds"] == pytest.approx(0.33)
    assert penstock("simulate", "--forward", "10MB")[0] == 2


def test_auto_is_not_behind_a_v_and_says_when_weights_are_there_twice():
    """The story: with one stage a lane only, auto was longer than the zb_v beside it."""
    _, out, _ = penstock("simulate", "--schedule", "auto", "--compare", "zb_v,zb_h1", "--json")
    steps = [row["step_seconds"] for row in json.loads(out)["schedules"]]
    assert steps[0] <= min(steps)
    _, out, _ = penstock("simulate", "--schedule", "dualpipe")
    assert "the weights of each stage on two lanes" in out


def test_a_file_has_its_own_counts(tmp_path):
    penstock("simulate", "--csv", str(tmp_path / "s.csv"))
    code, _, err = penstock("simulate", "--schedule", str(tmp_path / "s.csv"), "--lanes", "8")
    assert code == 2
    assert "a CSV file defines lanes" in err


def test_names_cannot_steer_the_terminal(tmp_path):
    hostile = tmp_path / "a\x1b[31m[red]b.csv"
    penstock("simulate", "--csv", str(tmp_path / "s.csv"))
    (tmp_path / "s.csv").rename(hostile)
    code, out, _ = penstock("simulate", "--schedule", str(hostile))
    assert code == 0
    assert "\x1b" not in out
    assert "[red]b" in out


def test_a_full_output_is_one_message():
    run = [sys.executable, "-c", "from penstock.cli.main import run; run()", "simulate"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"


def test_nothing_is_written_when_something_is_wrong(tmp_path):
    code, _, _ = penstock("simulate", "--html", str(tmp_path / "x.html"), "--compare", "nonsense")
    assert code == 2
    assert not list(tmp_path.iterdir())


def test_the_command_itself():
    """The real command in a real process: exit codes, one message on stderr, and no torch in its way."""
    run = [sys.executable, "-c", "from penstock.cli.main import run; run()"]
    good = subprocess.run([*run, "simulate", "--json"], capture_output=True, text=True, check=False)
    assert good.returncode == 0
    assert json.loads(good.stdout)
    bad = subprocess.run([*run, "simulate", "--schedule", "nope"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.startswith("Error: unknown schedule 'nope'")
    assert bad.stderr.count("\n") == 1
    usage = subprocess.run([*run, "simulate", "--lanez", "4"], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    version = subprocess.run([*run, "--version"], capture_output=True, text=True, check=False)
    assert version.stdout.startswith("penstock 0.")


def test_the_deciding_half_does_not_import_torch():
    code = "import sys, penstock, penstock.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_demo_writes_its_page(tmp_path):
    code, out, _ = penstock(
        "demo", "--simulate", "--folder", str(tmp_path / "demo"), "--lanes", "2", "--micro-batches", "3"
    )
    assert code == 0
    assert (tmp_path / "demo" / "timelines.html").exists()
    assert "timelines.html" in out.replace("\n", "")
    (tmp_path / "file").write_text("")
    code, _, err = penstock(
        "demo", "--simulate", "--folder", str(tmp_path / "file" / "x"), "--lanes", "2", "--micro-batches", "2"
    )
    assert code == 2
    assert "cannot be created" in err
