"""torch.profiler: each action of a step is a range with its name, on the thread of its lane."""

import warnings
from collections import Counter

import torch
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from pipelines import data, sequence
from runtime_everywhere import everywhere, pipeline


@everywhere
def test_actions_are_ranges_of_the_profiler():
    x, target = data(8)
    with pipeline(sequence(6), x, schedule="zb_h1", loss=F.mse_loss) as pipe:
        pipe.step(x, target)
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the end of a cycle
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
                pipe.step(x, target)
        names = Counter(event.name for event in profiled.events())
        wanted = {str(action) for lane in pipe.lanes for action in pipe.schedule.lanes[lane]}
        assert len(wanted) == 12 * len(pipe.lanes)
        assert {name: names[name] for name in wanted} == dict.fromkeys(wanted, 1)
        spans = {event.name: event.time_range for event in profiled.events() if event.name in wanted}
        if 0 in pipe.lanes:
            assert spans["0F0"].start < spans["0F1"].start


def test_without_a_profiler_there_are_no_ranges(monkeypatch):
    made = []
    monkeypatch.setattr(torch.profiler, "record_function", made.append)
    x, target = data(8)
    with pipeline(sequence(4), x, loss=F.mse_loss) as pipe:
        pipe.step(x, target)
    assert not made
