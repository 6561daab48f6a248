"""The configuration of penstock train: what a file and flags mean, and what is said of what is wrong with them."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import CheckpointError, HangError, LaneError, LostError, NonFiniteError, UsageError
from penstock.launch.build import trainer_builder as build
from penstock.launch.config.config import Config, keys_by_group
from penstock.launch.config.config_reader import read_config, take_flags
from penstock.launch.config.config_writer import example_file, origins_in, to_toml, toml_value
from penstock.launch.config.flag_values import kinds_of
from penstock.launch.processes.exit_codes import Policy, code_of
from penstock.launch.processes.process_logs import Tail
from penstock.launch.processes.worker_process import Tee
from penstock.torchrun import attempt

ROOT = Path(__file__).parents[3]


def config_of(tmp_path, text="", *words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    rest, flags, faults = take_flags(list(words), ["--json"])
    assert not rest
    return read_config(path, flags, faults)


# what is written, and what is said of it: each names the file and the line, or the flag, and the key
WRONG = [
    ("mirco_batches = 4", ("run.toml:1: mirco_batches: there is no such key. Did you mean 'micro_batches'?",)),
    ("learning_rate = 0.1", ("run.toml:1: learning_rate: there is no such key. Use lr",)),
    ("batch_size = 8", ("no such key. The data makes its batches: pass the size to your callable, as data_args",)),
    ("\n\nschedul = '1f1b'", ("run.toml:3: schedul: there is no such key. Did you mean 'schedule'?",)),
    ("[modle_args]\nwidth = 3", ("run.toml:1: modle_args: there is no such key. Did you mean 'model_args'?",)),
    ("steps = '10'", ("run.toml:1: steps: must be a whole number; given: '10'",)),
    ("steps = 1.5", ("steps: must be a whole number; given: 1.5",)),
    ("steps = 0", ("steps: must be 1 or more; given: 0",)),
    ("steps = -3", ("steps: must be 1 or more; given: -3",)),
    ("steps = true", ("steps: must be a whole number; given: True",)),
    ("lr = 0", ("lr: must be more than 0; given: 0",)),
    ("lr = nan", ("lr: must be a finite number; given: nan",)),
    ("lr = 'high'", ("lr: must be a number; given: 'high'",)),
    ("weight_decay = -0.1", ("weight_decay: must be 0 or more; given: -0.1",)),
    ("clip = 0", ("clip: must be more than 0; given: 0",)),
    ("accumulate = 0", ("accumulate: must be 1 or more",)),
    ("micro_batches = 0", ("micro_batches: must be 1 or more",)),
    ("seed = -1", ("seed: must be 0 or more",)),
    ("weight = 'mean'", ("weight: must be sum, package.module:callable or file.py:callable; given: 'mean'",)),
    ("weight = 3", ("weight: must be text; given: 3",)),
    ("weight = 'sum'\nloss_over = 'batch'", ("weight: has no effect with loss_over batch",)),
    ("loss_over = 'batches'", ("one of micro_batch, batch; given: 'batches'. Did you mean 'batch'?",)),
    ("loss_over = 'batch'\nloss = 'model'", ("loss_over: batch needs a loss",)),
    ("batch_dim = -1", ("batch_dim: must be 0 or more",)),
    ("batch_dim = {x = 'a'}", ("batch_dim", "must be a whole number",)),
    ("batch_dim = {x = 1}\nwhole = ['x']", ("whole: 'x' is whole, but batch_dim also names it",)),
    ("whole = 'x'", ("whole: must be a list; given: 'x'",)),
    ("capture_path = 'trace'", ("capture_path", "one of auto, direct, export, replay; given: 'trace'",)),
    ("deferred_batch_norm = 1", ("deferred_batch_norm: must be true or false; given: 1",)),
    ("compile = 'yes'", ("compile: must be true or false or a table; given: 'yes'",)),
    ("graphs = 'sometimes'", ("graphs: must be true or false or auto; given: 'sometimes'",)),
    ("precision = 'bf17'", ("one of fp32, bf16, fp16, fp64; given: 'bf17'. Did you mean 'bf16'?",)),
    ("on_nan = 'skp'", ("one of stop, skip, rewind, ignore; given: 'skp'. Did you mean 'skip'?",)),
    ("model_args = 3", ("model_args: must be a table; given: 3",)),
    ("callbacks = 'a:b'", ("callbacks: must be a list; given: 'a:b'",)),
    ("schedule = '1f1c'", ("run.toml:1: schedule: unknown schedule '1f1c'. Did you mean '1f1b'?",)),
    ("schedule = 'mine.csv'", ("schedule: there is no file mine.csv",)),
    ("keep = 'hld'", ("keep: 'hld' is not one of hold, recompute", "Did you mean 'hold'?")),
    ("keep = 'fit'", ("keep: fit needs memory_limit",)),
    ("memory_limit = '16 apples'", ("memory_limit: '16 apples' is not a number of bytes, such as 16GiB",)),
    ("lr_schedule = 'cosin'", ("lr_schedule: 'cosin' is not one of constant, linear", "Did you mean 'cosine'?")),
    ("steps = 5\nwarmup_steps = 5", ("run.toml:2: warmup_steps: 5, but there are only 5 steps",)),
    ("optimizer_args = {lr = 1}", ("optimizer_args: lr has its own key",)),
    ("on_oom = 'splt'", ("one of split, stop; given: 'splt'. Did you mean 'split'?",)),
    ("on_nan = 'rewind'\ncheckpoint_every = 0", ("on_nan: rewind needs checkpoints",)),
    ("model = 'penstock:gtp'", ("model: 'penstock:gtp': Penstock has no such model", "Did you mean 'penstock:gpt'?")),
    ("model = 'nowhere.py:make'\nloss = 'mse_loss'", ("run.toml:1: model: there is no file nowhere.py in",)),
    ("model = '/no/where.py:make'\nloss = 'mse_loss'", ("model: there is no file /no/where.py",)),
    ("model = 'nowhere.py'", ("model: must be nowhere.py:callable; given: 'nowhere.py'",)),
    ("model = 'my_code:make'", ("loss: set the loss of my_code:make",)),
    ("model = 'a b:c'\nloss = 'model'", ("must be package.module:callable or file.py:callable; given: 'a b:c'",)),
    ("model = 'conf.json'", ("model: there is no file conf.json",)),
    ("model = {n_layer = 3}", ("model: a table must have model_type",)),
    ("data = 'text'", ("data: must be package.module:callable or file.py:callable; given: 'text'",)),
    ("resume = 'atuo'", ("resume: 'atuo' is not auto, never or an existing folder", "Did you mean 'auto'?")),
    ("lanes = 2\nnproc = 3", ("each process is a lane, but these numbers differ: lanes: 2, nproc: 3",)),
    ("lanes = 2\ndevices = ['cpu']", ("each lane has a device, but these numbers differ: lanes: 2, devices: 1",)),
    ("nproc = 2\ndevices = ['cpu', 'cpu', 'cpu']", ("nproc: 2, devices: 3",)),
    ("nnodes = '2:1'", ("nnodes: must be 1 or more, and MIN must not exceed MAX; given: '2:1'",)),
    ("nnodes = 'two'", ("nnodes: must be a number of machines, or MIN:MAX; given: 'two'",)),
    ("nnodes = 2", ("rdzv_endpoint: 2 machines need a rendezvous", "rdzv_id: several machines need a name")),
    ("rdzv_backend = 'c11d'", ("rdzv_backend: 'c11d' is not one of", "Did you mean 'c10d'?")),
    ("rdzv_endpoint = 'a host:1'", ("rdzv_endpoint: must be HOST:PORT; given: 'a host:1'",)),
    ("schedule = 'pipedream'\nclip = 1.0", ("clip: pipedream updates weights within the step; leave clip out",)),
    ("steps = 3\nsteps-x = 3\nlr = -1", ("2 faults", "run.toml:2: steps-x", "run.toml:3: lr: must be more")),
    ("max-steps = 3\nsteps = 4", ("run.toml:2: steps: is set twice, also at",)),
    ("steps = ", ("run.toml: is not TOML",)),
    # each of these ended in a traceback of tomllib, of int() or of mkdir()
    ("data_args = {a = " + "[" * 5000 + "]" * 5000 + "}", ("run.toml: its lists or tables are nested more than 100",)),
    ("model_args." + ".".join("a" * 5000) + " = 1", ("run.toml:1: model_args: is nested more than 100 levels deep",)),
    ("warmup_steps = " + "9" * 5000, ("run.toml: has an integer that does not fit in 64 bits",)),
    ("data_args = {a = [0x" + "f" * 5000 + "]}", ("run.toml:1: data_args: has an integer that does not fit in 64",)),
    ('folder = "a\\u0000b"', ("run.toml:1: folder: must not contain a NUL character; given: 'a\\x00b'",)),
    ('devices = ["a\\u0000b"]', ("run.toml:1: devices: must not contain a NUL character",)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[text.splitlines()[0][:30] or text[-20:] for text, _ in WRONG])
def test_what_is_wrong_is_said(tmp_path, text, said):
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, text)
    for words in said:
        assert words in str(caught.value)


WRONG_FLAGS = [
    (["--mirco-batches", "4"], "--mirco-batches: there is no such flag. Did you mean '--micro-batches'?"),
    (["--learning-rate", "3"], "--learning-rate: there is no such flag. Use lr"),
    (["--epochs", "3"], "--epochs: there is no such flag. Use steps, the number of updates"),
    (["--lr"], "--lr: needs a value"),
    (["--lr", "fast"], "--lr: must be a number; given: 'fast'"),
    (["--steps=1.5"], "--steps: must be a whole number; given: '1.5'"),
    (["--no-lr"], "--no-lr: there is no such flag"),
    (["--model-args", "width"], "--model-args: must be NAME=VALUE, one flag per name; given: 'width'"),
    (["--no-compile=3"], "--no-compile: takes no value"),
    (["--jsn"], "Did you mean '--json'?"),
    (["--data-args", "{a = " + "[" * 5000 + "]" * 5000 + "}"], "is not a table, such as {width = 128}"),
    (["--seed", "9" * 30], "--seed: has an integer that does not fit in 64 bits"),
    (["--folder", "a\0b"], "--folder: must not contain a NUL character"),
]


@pytest.mark.parametrize(("words", "said"), WRONG_FLAGS)
def test_what_is_wrong_with_flags_is_said(tmp_path, words, said):
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, "", *words)
    assert said in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    """Editors on Windows write one; such a file was called "not TOML"."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    given = read_config(path)
    assert (given.config.steps, given.origins["steps"]) == (7, f"{path}:1")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_variables_of_torchrun_must_be_numbers(tmp_path, monkeypatch, name):
    """WORLD_SIZE=x ended in a traceback of int(); so did the others."""
    monkeypatch.setenv(name, "x")
    with pytest.raises(
        UsageError, match=f"^{name}: this environment variable must be a whole number or unset; given: 'x'$"
    ):
        config_of(tmp_path, "steps = 1")
    monkeypatch.setenv(name, "1")
    assert config_of(tmp_path, "steps = 1").config.steps == 1


def test_the_number_of_restarts_must_be_a_number(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "x")
    with pytest.raises(UsageError, match="TORCHELASTIC_RESTART_COUNT: this environment variable must be"):
        attempt()


def test_what_all_processes_say_is_shown_once(tmp_path):
    """The first draws in a terminal, and says it there itself; others wait a little, and then say what is their own."""
    first, other, out = tmp_path / "0", tmp_path / "1", io.StringIO()
    shown = {}
    tails = [Tail(first, None, prefix=None, shown=shown)]
    tails.append(Tail(other, out, prefix="[lane 1] ", shown=shown, hold_seconds=1000.0))
    other.write_text("Warning: slow\nError: bad data\nError: no disk\n")
    for tail in tails:
        tail.follow()
    assert out.getvalue() == "[lane 1] Warning: slow\n"
    with (tmp_path / "terminal").open("w") as terminal:
        both = Tee(terminal, first)
        both.write("Error: bad data\n")
        both.flush()
        assert not both.isatty()
    for tail in tails:
        tail.follow(is_last=True)
    assert out.getvalue() == "[lane 1] Warning: slow\n[lane 1] Error: no disk\n"
    assert (tmp_path / "terminal").read_text() == "Error: bad data\n"
    both._file.close()


def test_all_faults_of_file_and_flags_come_at_once(tmp_path):
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, "lr = -1\nkeep = 'x'\nsteps = 'x'", "--foo", "3", "--clip", "-1")
    assert [line.split(": ")[1 if "toml" in line else 0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "--foo", "steps", "lr", "--clip", "keep",
    ]  # fmt: skip


def test_flags_win_and_dashes_are_underscores(tmp_path):
    text = "micro-batches = 4\nlr = 0.1\nmodel_args = {width = 1, depth = 2}\ntensorboard = true"
    words = [
        "--micro_batches",
        "8",
        "--model-args",
        "width=3",
        "--model_args=name=gpt",
        "--no-tensorboard",
        "--compile",
    ]
    given = config_of(tmp_path, text, *words, "--devices", "cpu,cpu", "--memory-limit=1GiB", "--nproc-per-node", "2")
    config = given.config
    assert (config.micro_batches, config.lr, config.tensorboard, config.compile) == (8, 0.1, False, True)
    assert config.model_args == {"width": 3, "depth": 2, "name": "gpt"}
    assert (config.devices, config.memory_limit, config.nproc) == (["cpu", "cpu"], "1GiB", 2)
    assert given.origins["micro_batches"] == "--micro-batches"
    assert given.origins["lr"].endswith("run.toml:2")
    assert given.origins["steps"] == "default"


@pytest.mark.parametrize(
    ("words", "graphs"), [([], "auto"), (["--graphs"], True), (["--graphs=auto"], "auto"), (["--no-graphs"], False)]
)
def test_switches(tmp_path, words, graphs):
    assert config_of(tmp_path, "", *words).config.graphs is graphs or graphs == "auto"


@pytest.mark.parametrize(
    ("text", "words", "wanted"),
    [
        ("", [], False),
        ("", ["--compile"], True),
        ("compile = true", ["--no-compile"], False),
        ("compile = true", ["--compile=off"], False),
        ("", ["--compile=max_autotune=true", "--compile=triton.max_tiles=2"],
         {"max_autotune": True, "triton.max_tiles": 2}),
        ("compile = {max_autotune = true}", [], {"max_autotune": True}),
        ("compile = {max_autotune = true}", ["--compile={shape_padding = false}"],
         {"max_autotune": True, "shape_padding": False}),
        ("[compile]\ntriton.max_tiles = 2", [], {"triton": {"max_tiles": 2}}),
        ("compile = {max_autotune = true}", ["--no-compile"], False),
        ("", ["--compile", "max_autotune=true", "--compile", "{shape_padding = false}"],
         {"max_autotune": True, "shape_padding": False}),
        ("", ["--compile", "--lr=0.1"], True),
    ],
)  # fmt: skip
def test_compile_is_a_switch_or_a_table(tmp_path, text, words, wanted):
    given = config_of(tmp_path, text, *words)
    assert given.config.compile == wanted
    assert type(given.config.compile) is type(wanted)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(given))
    assert read_config(again).config == given.config


def test_the_resolved_file_means_the_same_and_says_where_from(tmp_path):
    text = (
        "clip = 1.0\nmodel_args = {name = \"a  # b\\u007f\", list = [1, 2.5, true]}\ncuts = [3, 'blocks.1']\nnproc = 2"
    )
    given = config_of(tmp_path, text, "--lr", "1e-4")
    written = to_toml(given)
    again = tmp_path / "again.toml"
    again.write_text(written)
    assert read_config(again).config == given.config
    assert origins_in(written) == {
        name: origin for name, origin in given.origins.items() if getattr(given.config, name) is not None
    }


def test_the_file_to_begin_with_says_all_keys_and_is_right_without_its_marks(tmp_path):
    text = example_file()
    assert tomllib.loads(text) == {}
    lines = [
        line[2:]
        for line in text.splitlines()
        if line.startswith("# ") and line[2:].split(" = ")[0] in Config.model_fields
    ]
    keys = [name for names in keys_by_group().values() for name in names]
    assert [line.split(" = ")[0] for line in lines] == keys == list(Config.model_fields)
    for line in lines:  # each alone: some contradict each other
        assert next(iter(tomllib.loads(line))) in Config.model_fields
    assert config_of(tmp_path, text).config == Config()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_right(path):
    if path.name != "ruff.toml":
        assert read_config(path).config != Config()


WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", list: "list", dict: "table"}


def key_table():
    """Return all keys as tables in Markdown, for the page of the command."""
    lines = []
    for group, names in keys_by_group().items():
        lines += [f"### {group}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for name in names:
            field = Config.model_fields[name]
            default = field.get_default(call_default_factory=True)
            words = " or ".join(word for kind, word in WORDS.items() if kind in kinds_of(name))
            shown = "–" if default is None else f"`{toml_value(default)}`"
            lines.append(f"| `{name}` | {words} | {shown} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_has_the_table_of_all_keys():
    page = (ROOT / "docs" / "howto" / "train_command.md").read_text()
    assert key_table() in page, f"docs/howto/train_command.md: put what key_table() in {__file__} returns there"


def test_nothing_of_torch_is_loaded_to_say_what_is_wrong(tmp_path):
    (tmp_path / "run.toml").write_text("stps = 3")
    code = (
        "import sys\nfrom penstock.cli.main import app\nfrom penstock.errors import UsageError\n"
        "try: app(['train', 'run.toml'])\nexcept UsageError as error: assert 'stps' in str(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


# ---- whether processes are started again


def raised(*errors):
    """Return the last of some errors, each raised while the one before was handled."""
    for before, error in pairwise(errors):
        error.__context__ = before
    return errors[-1]


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([ValueError("of the user")], 1),
        ([LaneError("an action failed")], 1),
        ([NonFiniteError("nan")], 1),
        ([UsageError("wrong")], 2),
        ([CheckpointError("bad")], 65),
        ([KeyboardInterrupt()], 130),
        ([HangError("lane 1 hangs")], 75),
        ([LostError("lane 1 is gone")], 75),
        ([LostError("lane 1 is gone"), TypeError("in tidying up")], 75),
    ],
    ids=lambda given: given if isinstance(given, int) else type(given[-1]).__name__,
)
def test_each_error_has_its_code(errors, code):
    assert code_of(raised(*errors)) == code


def judge(policy, exits, *faults, now=0.0, **more):
    return policy.judge(exits, faults, now=now, **more)


@pytest.mark.parametrize(
    ("exits", "code"), [({0: 1, 1: 75}, 1), ({0: 75, 1: 2}, 2), ({0: 65, 1: 75}, 65), ({0: 1, 1: 2}, 2), ({0: 3}, 1)]
)
def test_errors_that_would_happen_again_are_not_tried_again(exits, code):
    verdict = judge(Policy(3), exits)
    assert (verdict.is_again, verdict.code) == (False, code)


def test_lost_processes_are_started_again_so_often_an_hour_and_slower_each_time():
    policy = Policy(3)
    verdicts = [judge(policy, {0: 75, 1: -9}, now=now) for now in (0, 1, 2, 3)]
    assert [verdict.is_again for verdict in verdicts] == [True, True, True, False]
    assert [verdict.seconds for verdict in verdicts[:3]] == [0, 1, 2]
    assert verdicts[-1].code == 137
    assert "process 1 was killed by SIGKILL" in verdicts[-1].why
    assert judge(policy, {0: -9}, now=3601).is_again  # the first is an hour ago


def test_the_same_hang_twice_is_not_tried_again():
    hang = {"kind": "end", "error": "HangError", "step": 4, "lane": 0, "message": "lane 0 has waited 3 s for lane 1"}
    policy = Policy(3)
    assert judge(policy, {0: 75}, hang, stuck=[1]).is_again
    verdict = judge(policy, {0: 75}, hang | {"message": "lane 0 has waited 3.1 s for lane 1"}, stuck=[1])
    assert (verdict.is_again, verdict.code) == (False, 1)
    assert "the same failure twice, at step 4" in verdict.why
    assert judge(Policy(3), {0: 75}, hang, stuck=[1]).is_again
    assert judge(policy, {0: 75}, hang | {"step": 5}, stuck=[1]).is_again


def test_who_raised_and_was_killed_in_its_last_save_is_not_started_again():
    raised = {"kind": "error", "step": 3, "message": "ValueError: mine", "is_lost": False}
    verdict = judge(Policy(3), {1: 75}, raised, stuck=[0])
    assert (verdict.is_again, verdict.code, verdict.why) == (False, 1, "ValueError: mine")
    assert judge(Policy(3), {1: 75}, raised | {"is_lost": True}, stuck=[0]).is_again


@pytest.mark.parametrize(
    ("told", "exits", "stuck", "code"),
    [
        ("SIGTERM", {0: 0, 1: 0}, [], 0),
        ("SIGTERM", {0: 0}, [1], 143),
        ("SIGTERM", {0: -15, 1: 0}, [], 0),
        ("SIGINT", {0: 130}, [], 130),
    ],
)
def test_what_was_told_to_end_is_not_started_again(told, exits, stuck, code):
    verdict = judge(Policy(3), exits, signal_name=told, stuck=stuck)
    assert (verdict.is_again, verdict.code) == (False, code)


@pytest.mark.parametrize(
    ("devices", "lanes", "wanted"),
    [
        (None, 2, 4),
        (None, 3, 2),
        (None, 16, 1),
        (None, 1, None),
        (["cpu", "cpu"], 2, 4),
        (["cuda:0", "cuda:1"], 2, None),
    ],
)
def test_a_plan_is_measured_with_the_threads_that_a_lane_will_have(devices, lanes, wanted, monkeypatch):
    monkeypatch.setattr(build.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    assert build.threads_of(SimpleNamespace(devices=devices), lanes) == wanted
