"""Plans of a run folder: a training that goes on there is cut as before, whatever a measurement would say now."""

import json

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.deciding.cut_request import CutRequest

WIDTH = 8


def model_of(count=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).double()


def pipeline(model, *, lanes=2, **options):
    x = torch.ones(8, WIDTH, dtype=torch.float64)
    options = {"micro_batches": 4, "timeout": 60.0, "analytic": "h100"} | options
    return penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, lanes=lanes, **options)


def data(count=4):
    x = torch.ones(8, WIDTH, dtype=torch.float64)
    return [(x, x)] * count


def fit(pipe, folder, steps):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    return penstock.Trainer(pipe, optimizer, data(8), steps=steps, folder=folder, view=False).fit()


@pytest.fixture
def trained(tmp_path):
    """A folder with two steps of a training that is cut at 4."""
    with pipeline(model_of()) as pipe:
        assert pipe.cuts == (4,)
        fit(pipe, tmp_path, 2)
    return tmp_path


@pytest.fixture
def otherwise(trained, monkeypatch):
    """Have measurements say something else from here on: all cuts come to lie at 2."""
    decide = CutRequest._cut

    def cut(self, profile, schedule):
        self = type(self)(**{**vars(self), "cuts": (2, *(range(3, schedule.num_stages + 1)))})
        return decide(self, profile, schedule)

    monkeypatch.setattr(CutRequest, "_cut", cut)


@pytest.mark.usefixtures("otherwise")
def test_a_resume_is_cut_as_before(trained):
    """Each resume measured anew, and cuts followed the times: one of four went on with others."""
    with pipeline(model_of()) as pipe:
        assert pipe.cuts == (2,)
    with pipeline(model_of(), plan=trained) as pipe:
        assert pipe.cuts == (4,)
        assert fit(pipe, trained, 4).resumed_from == 2
    with pipeline(model_of(), plan=trained) as pipe:  # written anew, by one that was taken from it
        assert pipe.cuts == (4,)


@pytest.mark.usefixtures("otherwise")
@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (8, {"micro_batches": 8}, "micro_batches: 4, now 8"),
        (8, {"schedule": "gpipe"}, "schedule: 1f1b, now gpipe"),
        (8, {"lanes": 3}, "lanes: 2, now 3"),
        (8, {"keep": "recompute"}, "keep: hold, now recompute"),
        (9, {}, "another model; nodes: 8, now 9"),
    ],
)
def test_what_has_changed_is_told_and_decided_anew(trained, count, options, words):
    with pytest.warns(UserWarning, match=words), pipeline(model_of(count), plan=trained, **options) as pipe:
        assert pipe.cuts[0] == 2


@pytest.mark.usefixtures("otherwise")
@pytest.mark.parametrize("text", ["{", "[]", '{"asked": 3}'])
def test_a_damaged_plan_is_told(trained, text):
    (trained / "plan.json").write_text(text)
    with pytest.warns(UserWarning, match="decided again"), pipeline(model_of(), plan=trained) as pipe:
        assert pipe.cuts == (2,)


@pytest.mark.usefixtures("otherwise")
@pytest.mark.parametrize("cuts", [[99], [1, 2], "x", [None]])
def test_a_plan_with_wrong_cuts_is_told(trained, cuts):
    plan = json.loads((trained / "plan.json").read_text())
    (trained / "plan.json").write_text(json.dumps(plan | {"cuts": cuts}))
    with pytest.warns(UserWarning, match="damaged"), pipeline(model_of(), plan=trained) as pipe:
        assert pipe.cuts == (2,)


def test_a_folder_without_a_plan_is_a_new_one(tmp_path):
    with pipeline(model_of(), plan=tmp_path / "new") as pipe:
        assert pipe.cuts == (4,)


def test_a_schedule_that_is_made_for_costs_is_the_same_again(tmp_path):
    with pipeline(model_of(), schedule="auto") as pipe:
        fit(pipe, tmp_path, 1)
        schedule, cuts = pipe.schedule, pipe.cuts
    with pipeline(model_of(), schedule="auto", plan=tmp_path, analytic=None, profile=None) as pipe:
        assert (pipe.schedule, pipe.cuts) == (schedule, cuts)
        assert pipe.plan.source  # nothing was measured


def in_process(folder):
    with pipeline(model_of(), plan=folder) as pipe:
        return list(pipe.cuts)


def test_processes_take_the_plan_of_the_first(trained):
    plan = json.loads((trained / "plan.json").read_text())
    (trained / "plan.json").write_text(json.dumps(plan | {"cuts": [5]}))
    assert processes.run(in_process, 2, str(trained)) == [[5], [5]]
