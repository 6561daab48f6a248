"""A plan is the whole decision: made once, printed, written, read, and run without deciding anything again."""

import json

import pytest
import torch
from torch import nn

import penstock
from penstock.deciding.plan import Plan
from penstock.errors import UsageError
from pipelines import differences, expected
from runtime_everywhere import everywhere

WIDTH = 8
LINK = penstock.Cluster(link=penstock.Link(1e-6, 1e9), links={(0, 1): penstock.Link(2e-6)})


def model_of(count=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).double()


def batch_of(size=8):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(model=None, **options):
    options = {"lanes": 2, "micro_batches": 4, "analytic": "h100"} | options
    return penstock.plan(model_of() if model is None else model, example=batch_of(), **options)


def run(plan, model=None, **options):
    model = model_of() if model is None else model
    return penstock.Pipeline(model, example=batch_of(), loss=nn.functional.mse_loss, plan=plan, timeout=60, **options)


OPTIONS = [
    {},
    {"schedule": "zb_h1", "lanes": 3, "micro_batches": 5},
    {"schedule": "interleaved_1f1b", "stages_per_lane": 2},
    {"schedule": "auto"},
    {"schedule": "pipedream_2bw"},
    {"schedule": "dualpipe", "micro_batches": 4},
    {"keep": "recompute"},
    {"keep": ["hold", "offload"]},
    {"keep": "fit", "memory_limit": 12e3},
    {"cluster": LINK, "cuts": ["3"]},
    {"capture_path": "export"},
    {"capture_path": "replay", "memory_limit": "1GiB"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_plan_is_the_same_after_it_was_written(options, tmp_path):
    plan = made(**options)
    path = tmp_path / "plan.json"
    text = plan.to_json(path)
    for again in (Plan.from_json(path), Plan.from_json(text), Plan.from_json(str(path))):
        assert again == plan
        assert str(again) == str(plan)
        assert again.explain().to_dict() == plan.explain().to_dict()
        assert again.to_json() == text
    json.loads(text)


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("schedule") != "pipedream_2bw"], ids=str)
def test_a_plan_is_run_as_it_is(options, tmp_path):
    """Loss and gradients are the plain model's, and nothing is decided anew."""
    plan = made(**options)
    plan.to_json(tmp_path / "plan.json")
    x, target = batch_of(), batch_of()
    for given in (plan, tmp_path / "plan.json"):
        with run(given) as pipe:
            assert pipe.plan == plan
            assert (pipe.schedule, pipe.cuts) == (plan.schedule, plan.cuts)
            assert str(pipe.explain()) == str(plan)
            wanted = expected(model_of(), x, target)
            assert not list(differences(pipe, pipe.step(x, target), wanted))


@everywhere
def test_a_plan_is_run_in_threads_and_processes():
    plan = made(schedule="zb_h1", cuts=["5"])
    x, target = batch_of(), batch_of()
    with run(plan) as pipe:
        assert pipe.cuts == (5,)
        assert not list(differences(pipe, pipe.step(x, target), expected(model_of(), x, target)))


def test_the_plan_of_a_pipeline_is_the_plan():
    with penstock.Pipeline(
        model_of(), example=batch_of(), loss=nn.functional.mse_loss, lanes=2, micro_batches=4, analytic="h100"
    ) as pipe:
        assert pipe.plan == made()
        assert str(pipe.plan) == str(made())


def test_a_pipeline_with_nothing_to_choose_measures_nothing():
    with penstock.Pipeline(
        model_of(), example=batch_of(), loss=nn.functional.mse_loss, lanes=2, micro_batches=4, cuts=[4]
    ) as pipe:
        plan = pipe.plan
        assert plan.explanation is None
        assert str(plan) == "schedule 1f1b on 2 lanes, 4 micro-batches, cuts at [4], keep: hold"
        with pytest.raises(UsageError, match="nothing was measured"):
            plan.explain()
        assert Plan.from_json(plan.to_json()) == plan
        pipe.explain()
        assert pipe.plan.explanation is not None


def test_cuts_that_were_edited_are_run_and_told():
    found = json.loads(made().to_json())
    plan = Plan.from_json(json.dumps(found | {"cuts": [6]}))
    assert plan.explain().partition.cuts == (6,)
    with run(plan) as pipe:
        assert pipe.cuts == (6,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 3}, r"lanes: 3 \(the plan has 2"),
        ({"schedule": "gpipe", "micro_batches": 8}, r"schedule: 'gpipe' \(the plan has '1f1b'\); micro_batches: 8"),
        ({"cuts": [3]}, "cuts"),
        ({"keep": "recompute"}, r"keep: 'recompute' \(the plan has 'hold'"),
        ({"analytic": "h100"}, "analytic: 'h100'"),
        ({"capture_path": "export"}, "capture_path"),
    ],
)
def test_what_a_plan_decides_is_not_asked_for_beside_it(options, message):
    with pytest.raises(UsageError, match=message):
        run(made(), **options)


def test_what_agrees_with_the_plan_may_be_said():
    with run(made(), lanes=2, micro_batches=4, schedule="1f1b", cuts=[4]) as pipe:
        assert pipe.cuts == (4,)


@pytest.mark.parametrize(("count", "cut"), [(9, None), (8, 20)])
def test_a_plan_of_another_model_is_refused(count, cut):
    plan = made()
    if cut is not None:
        plan = Plan.from_json(json.dumps(json.loads(plan.to_json()) | {"cuts": [cut], "explanation": None}))
    with pytest.raises(UsageError, match=r"plan: (it was made for another model|cut 20 lies outside)"):
        run(plan, model_of(count))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format": "penstock plan 1"}', '{"format": "penstock plan 0"}', "{" * 100_000]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json: (cannot be read as a plan|is not a plan|is a damaged plan)"):
        Plan.from_json(path)
    with pytest.raises(UsageError, match=r"plan\.json"):
        run(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json: cannot be read"):
        run(tmp_path / "none.json")


def test_a_captured_model_can_be_handed_in():
    from penstock.model.capture.capture import capture

    model = model_of()
    captured = capture(model, batch_of(), training=True)
    plan = penstock.plan(captured, example=batch_of(), lanes=2, micro_batches=4, analytic="h100")
    assert plan == made()
    with run(plan, captured) as pipe:
        wanted = expected(model_of(), batch_of(), batch_of())
        assert not list(differences(pipe, pipe.step(batch_of(), batch_of()), wanted))
        assert all(p.grad is not None for p in model.parameters())


def test_smaller_micro_batches_after_a_plan():
    """What on_oom does: a plan whose schedule has a name is built again for twice the micro-batches."""
    with run(made()) as pipe:
        pipe.step(batch_of(), batch_of())
        assert penstock.pipeline.split_finer(pipe)
        assert pipe.schedule.num_mbs == 8
        pipe.zero_grad()
        wanted = expected(model_of(), batch_of(), batch_of())
        assert not list(differences(pipe, pipe.step(batch_of(), batch_of()), wanted))
