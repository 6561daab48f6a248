"""explain: what it says of a model with skips and tied weights, of schedules made for costs, and of wrong input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CostError, PartitionError, PenstockError, ScheduleError, UsageError
from penstock.model.graph import Graph, Node
from penstock.model.profile import Profile
from penstock.planning.explain.stage_modules import module_parts, shorten


class Skipping(nn.Module):
    """A chain of blocks whose first value is used again at the end, and whose first weight is its last."""

    def __init__(self, width: int = 8, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


TOKENS = torch.zeros(4, 5, dtype=torch.long)


@pytest.fixture(scope="module")
def skipping() -> penstock.planning.explain.explanation.Explanation:
    return penstock.explain(Skipping(), TOKENS, lanes=3, micro_batches=6, analytic="cpu")


def test_the_table_adds_up(skipping):
    stages, profile = skipping.stages, skipping.profile
    assert [stage.index for stage in stages] == [0, 1, 2]
    assert sum(stage.num_nodes for stage in stages) == len(skipping.graph.nodes)
    assert sum(stage.share for stage in stages) == pytest.approx(1)
    assert sum(stage.forward_seconds for stage in stages) == pytest.approx(profile.forward.sum())
    backward = (profile.input_grad + profile.weight_grad).sum()
    assert sum(stage.backward_seconds for stage in stages) == pytest.approx(backward)
    assert skipping.num_parameters == 32 * 8 + 6 * (8 * 8 + 8)
    assert skipping.balance >= 1
    assert skipping.balance == pytest.approx(
        max(skipping.partition.lane_seconds) * 3 / sum(skipping.partition.lane_seconds)
    )


def test_one_stage_a_lane_holds_what_its_lane_holds(skipping):
    for stage, lane in zip(skipping.stages, skipping.lanes, strict=True):
        assert stage.memory_bytes == pytest.approx(lane.num_bytes)
        assert lane.stages == (stage.index,)


def test_what_crosses_is_what_the_graph_says_and_skips_are_marked(skipping):
    for stage, cut in zip(skipping.stages, skipping.partition.cuts, strict=False):
        assert {value.name for value in stage.crossing} == {
            skipping.graph.values[index].name for index in skipping.graph.crossing(cut)
        }
        assert stage.crossing_bytes == skipping.profile.crossing_bytes[cut]
        assert any(value.skips_at(stage.index) for value in stage.crossing)
    skip = next(value for value in skipping.stages[0].crossing if value.skips_at(0))
    assert (skip.source, skip.targets, skip.shape) == (0, (2,), "float32[batch, 5, 8]")
    assert skip.num_bytes == 4 * 4 * 5 * 8
    assert skipping.stages[-1].crossing == ()


def test_tied_weights_are_named_and_held_twice(skipping):
    (tie,) = skipping.ties
    assert (tie.name, tie.aliases, tie.stages) == ("embed.weight", ("head.weight",), (0, 2))
    assert sum(stage.num_parameters for stage in skipping.stages) == skipping.num_parameters + 32 * 8


def test_the_text_says_it_all_in_any_width(skipping):
    for width in (60, 80, 110, 200):
        text = skipping.to_text(width=width, color=False)
        assert "\x1b" not in text
        joined = " ".join(text.split())
        for words in (
            "Skipping: 688 parameters",
            "captured by export: torch.export traced the whole model",
            "analytic on",
            "schedule 1f1b on 3 lanes, 6 micro-batches per step",
            "skipping the next stage: float32[batch, 5, 8] 640 B (stage 0 → 2)",
            "embed.weight = head.weight (1 KiB): stages 0, 2 hold it",
            "balance: 1.",
            "predicted step:",
            "of the makespan",
        ):
            assert words in joined, words
    assert max(map(len, skipping.to_text(width=110, color=False).splitlines())) <= 110
    colored = skipping.to_text(width=110, color=True)
    assert "\x1b[1m" in colored
    assert "predicted step" in next(line for line in colored.splitlines() if "\x1b" not in line and "step:" in line)
    assert str(skipping).startswith("Skipping")
    assert "3 stages" in repr(skipping)


def test_json_is_plain_data(skipping):
    found = json.loads(skipping.to_json())
    assert found["capture"] == {"path": "export", "reason": "torch.export traced the whole model"}
    assert found["cuts"] == list(skipping.partition.cuts)
    assert found["stages"][0]["crossing"][0]["targets"]
    assert found["step_seconds"] == skipping.timeline.step_seconds
    assert found["tied_parameters"][0]["stages"] == [0, 2]


def test_a_measured_profile_is_there_by_default_and_can_be_used_again(tmp_path):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    told = []
    found = penstock.explain(
        model, torch.zeros(3, 16), lanes=2, batch_size=5, progress=lambda what, done, total: told.append((what, total))
    )
    assert (found.profile.method, found.profile.batch_size, found.path) == ("measured", 5, "direct")
    assert {"capture", "profile", "cut and schedule"} == {what for what, _ in told}
    found.profile.save(tmp_path / "profile.json")
    for again in (found.profile, tmp_path / "profile.json"):
        second = penstock.explain(model, torch.zeros(3, 16), lanes=2, profile=again)
        assert second.partition == found.partition


@pytest.mark.parametrize(
    ("schedule", "stages_per_lane", "num_stages"),
    [
        ("zb_h1", None, 2),
        ("zb_2p", None, 2),
        ("zb_v", None, 4),
        ("interleaved_1f1b", 3, 6),
        ("auto", None, 2),
        ("auto", 2, 4),
        ("dualpipe", None, 2),
        ("pipedream", None, 2),
    ],
)
def test_schedules_get_their_own_stages_and_costs(schedule, stages_per_lane, num_stages):
    found = penstock.explain(
        Skipping(), TOKENS, lanes=2, schedule=schedule, stages_per_lane=stages_per_lane, analytic="cpu"
    )
    assert len(found.stages) == num_stages
    assert found.partition.lane_of == found.schedule.lane_of
    penstock.schedules.verify(found.schedule)
    expected = penstock.simulate(found.schedule, found.profile.costs(found.partition.cuts))
    assert found.timeline.step_seconds == expected.step_seconds
    for lane in found.lanes:
        assert lane.num_bytes <= sum(found.stages[s].memory_bytes for s in lane.stages) * (1 + 1e-9)
    assert ("lane  stages" in str(found)) == (num_stages > 2 or schedule == "dualpipe")


def test_auto_stays_within_the_memory_that_weights_leave():
    free = penstock.explain(Skipping(), TOKENS, lanes=2, schedule="auto", analytic="cpu")
    limit = 0.99 * max(free.partition.lane_bytes)
    found = penstock.explain(Skipping(), TOKENS, lanes=2, schedule="auto", analytic="cpu", memory_limit=limit)
    assert max(found.partition.lane_bytes) <= limit
    assert found.memory_limit == (limit, limit)
    assert "of" in found.to_text(width=100, color=False).split("memory of limit")[1].splitlines()[1]


def test_asked_for_cuts_stand_and_the_others_are_chosen():
    found = penstock.explain(Skipping(), TOKENS, lanes=3, cuts=["blocks.1"], analytic="cpu")
    first = next(i for i, node in enumerate(found.graph.nodes) if node.module.startswith("blocks.1"))
    assert first in found.partition.cuts
    assert len(found.partition.cuts) == 2


def test_a_schedule_of_ones_own_has_its_own_counts():
    mine = penstock.schedules.build("gpipe", lanes=2, micro_batches=3)
    found = penstock.explain(Skipping(), TOKENS, schedule=mine, analytic="cpu", keep="recompute")
    assert found.schedule is mine
    assert found.keep == "recompute"
    with pytest.raises(UsageError, match="leave out lanes"):
        penstock.explain(Skipping(), TOKENS, schedule=mine, lanes=2, analytic="cpu")


def test_links_slow_the_step_down():
    slow = penstock.Cluster(link=penstock.Link(latency_seconds=1e-3))
    plain = penstock.explain(Skipping(), TOKENS, lanes=2, analytic="cpu")
    found = penstock.explain(Skipping(), TOKENS, lanes=2, analytic="cpu", cluster=slow)
    assert found.timeline.step_seconds > plain.timeline.step_seconds + 1e-3
    assert "no links were given" in str(plain)
    assert "no links were given" not in str(found)


def test_the_way_that_was_taken_and_why():
    model = Skipping()
    model.blocks[2].register_forward_hook(lambda module, args, output: None)
    found = penstock.explain(model, TOKENS, lanes=2, analytic="cpu")
    assert found.path == "replay"
    assert "captured by replay: hooks on blocks.2" in str(found)
    asked = penstock.explain(Skipping(), TOKENS, lanes=2, analytic="cpu", capture_path="replay")
    assert asked.path == "replay"


def test_a_list_of_stage_modules():
    stages = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
    found = penstock.explain(stages, torch.zeros(2, 4), lanes=2, analytic="cpu")
    assert found.model == "stage modules"
    assert found.num_parameters == 2 * 20 + 10


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"example": None}, UsageError, "pass the arguments of the model"),
        ({"model": 3}, UsageError, "model: pass a torch.nn.Module"),
        ({"lanes": 0}, ScheduleError, "lanes: 0"),
        ({"lanes": 900}, PartitionError, "request fewer stages"),
        ({"micro_batches": 0}, ScheduleError, "micro_batches: 0"),
        ({"schedule": "1f1c"}, ScheduleError, "Did you mean '1f1b'"),
        ({"schedule": "1f1b", "stages_per_lane": 2}, ScheduleError, "leave stages_per_lane out"),
        ({"keep": "offload"}, UsageError, "not one of hold, recompute"),
        ({"memory_limit": 10.0}, PartitionError, "no cuts fit the memory"),
        ({"memory_limit": [1e9]}, CostError, "one per lane; lanes: 2"),
        ({"memory_limit": -1}, CostError, "above 0"),
        ({"cluster": 3}, UsageError, "cluster: pass a penstock.Cluster"),
        ({"cluster": penstock.Cluster(speed=[1.0])}, CostError, "one per lane; lanes: 2"),
        ({"batch_size": 0}, ScheduleError, "batch_size: 0"),
        ({"analytic": "h10"}, UsageError, "Did you mean 'h100'"),
        ({"device": "cpu"}, UsageError, "device: only applies to measuring"),
        ({"profile": "none.json"}, UsageError, "pass one of them"),
        ({"analytic": None, "profile": "none.json"}, CostError, "cannot be read"),
        ({"cuts": ["nope"]}, UsageError, "no node or module 'nope'"),
        ({"cuts": "blocks.1.0", "lanes": 1}, PartitionError, "1 stages have 0"),
        ({"capture_path": "exprt"}, UsageError, "Did you mean 'export'"),
        ({"optimizer_bytes": -1.0}, CostError, "optimizer_bytes"),
    ],
)
def test_wrong_input_gets_one_message(given, error, message):
    arguments = {"model": Skipping(), "example": TOKENS, "lanes": 2, "analytic": "cpu", **given}
    with pytest.raises(error, match=message) as raised:
        penstock.explain(arguments.pop("model"), arguments.pop("example"), **arguments)
    assert isinstance(raised.value, PenstockError)
    assert "\n" not in str(raised.value)


def test_a_profile_of_another_model_is_refused():
    other = penstock.explain(Skipping(blocks=3), TOKENS, lanes=2, analytic="cpu").profile
    with pytest.raises(UsageError, match="to another graph"):
        penstock.explain(Skipping(), TOKENS, lanes=2, profile=other)
    own = penstock.explain(Skipping(), TOKENS, lanes=2, analytic="cpu").profile
    with pytest.raises(UsageError, match="made for 4"):
        penstock.explain(Skipping(), TOKENS, lanes=2, profile=own, batch_size=3)


def graph_of(*modules):
    return Graph(
        nodes=tuple(Node(f"n{i}", "op", module, (), ()) for i, module in enumerate(modules)),
        values=(),
        inputs=(),
        outputs=(),
    )


def test_modules_in_few_words():
    layers = [f"net.h.{i}.{part}" for i in range(8) for part in ("attn", "mlp")]
    graph = graph_of("net.wte", *layers, "net.ln", "head", "")
    assert shorten(module_parts(graph, range(0, 9))) == "net.{wte, h.0–3}"
    assert shorten(module_parts(graph, range(2, 10))) == "net.h.{0 (part), 1–3, 4 (part)}"
    assert shorten(module_parts(graph, range(9, 20))) == "net.{h.4–7, ln}, head"
    assert shorten(module_parts(graph, range(3, 4))) == "net.h.1.attn"
    assert shorten(module_parts(graph, range(0, 20))) == "the whole model"
    assert shorten(module_parts(graph, range(19, 20))) == "the model (part)"
    assert shorten(module_parts(graph_of(*"0012"), range(1, 4))) == "0 (part), 1–2"


def test_names_cannot_steer_the_terminal():
    hostile = graph_of("a\x1b[31m", "b")
    profile = Profile(hostile, 1, *([[1.0, 1.0]] * 5))
    schedule = penstock.schedules.build("1f1b", lanes=2, micro_batches=2)
    cuts = penstock.planning.partition.partition.partition(profile, schedule=schedule)
    timeline = penstock.simulate(schedule, profile.costs(cuts.cuts))
    found = penstock.planning.explain.explanation.Explanation(
        "m\x1b", "export", "r\x1b", profile, cuts, schedule, timeline
    )
    assert "\x1b" not in found.to_text(width=100, color=False)


def test_torch_is_imported_by_explain_and_by_nothing_before():
    code = "import sys, penstock; print('torch' in sys.modules); penstock.explain; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
