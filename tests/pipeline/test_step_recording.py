"""What was recorded: one timeline of all lanes, whatever their clocks say."""

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.pipeline.step_recording import _timeline
from pipelines import data, sequence


@pytest.fixture
def recorded():
    """A pipeline, and the timeline of one of its steps."""
    x, target = data(8)
    with penstock.Pipeline(
        sequence(), example=x, loss=nn.functional.mse_loss, schedule="1f1b", micro_batches=4, lanes=2, cuts=[8]
    ) as pipe:
        pipe.step(x, target)
        with pipe.record() as recording:
            pipe.step(x, target)
        yield pipe, recording.timeline


@pytest.mark.parametrize("behind", [1e-3, 1.0, -1.0])
def test_nothing_arrives_before_it_is_sent(recorded, tmp_path, behind):
    """The clock of the second lane is behind, or in front: its receives end, by it, when nothing was sent yet."""
    pipe, seen = recorded
    shift = np.where(seen.lane == 1, -behind, 0.0)
    start = seen.start + shift
    end = np.where(np.isnan(seen.end), seen.start, seen.end) + shift
    end = np.maximum(end, start + 1e-3)  # so that all have waited
    spans = np.stack([seen.place, start, end], axis=1).tolist()
    stages = pipe.schedule.num_stages
    held = {f"{name}_bytes": np.zeros(stages) for name in ("saved", "pending", "input")}
    timeline = _timeline(pipe._steps.setup.lowered(True), spans, held, is_whole=True)
    assert not (timeline.end < timeline.start).any()
    assert timeline.start.min() == 0
    assert timeline.step_seconds >= abs(behind)
    timeline.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert torch.isfinite(torch.tensor(timeline.bubble))
