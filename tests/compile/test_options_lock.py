"""One thread compiles at a time, and nobody begins to run compiled code meanwhile."""

import threading

import pytest
import torch
from torch import nn

from penstock.compile import passes as own_pass
from penstock.compile.options import Options, compiled, inductor, with_compile_lock

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own

REFUSED = "Detected that you are using FX to symbolically trace a dynamo-optimized function."


class Tracing:
    """Stands for Inductor: traces until it is told to stop, and torch refuses calls meanwhile."""

    def __init__(self):
        self.has_begun, self.may_end, self.is_at_it = threading.Event(), threading.Event(), False

    def compile_fx(self, graph, inputs, *, config_patches, **_):
        self.is_at_it = True
        self.has_begun.set()
        assert self.may_end.wait(30)
        self.is_at_it = False
        return config_patches

    def run(self, x):
        if self.is_at_it:
            raise RuntimeError(REFUSED)
        return x + 1


def test_who_calls_waits_for_who_compiles(monkeypatch):
    tracing, found = Tracing(), {}
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", tracing.compile_fx)
    threads = [
        threading.Thread(target=lambda: found.update(made=inductor(None, (), options={"epilogue-fusion": True}))),
        threading.Thread(target=lambda: found.update(ran=with_compile_lock(tracing.run)(1))),
    ]
    threads[0].start()
    assert tracing.has_begun.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert found == {}
    tracing.may_end.set()
    for thread in threads:
        thread.join(30)
    assert found == {"made": {"epilogue_fusion": True}, "ran": 2}


def test_who_was_refused_because_another_had_just_begun_calls_again(monkeypatch):
    calls = []

    def run():
        calls.append(1)
        if len(calls) == 1:
            monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda *_, **__: None)
            inductor(None, (), options={})
            raise RuntimeError(REFUSED)
        return "done"

    assert with_compile_lock(run)() == "done"
    assert len(calls) == 2


@pytest.mark.parametrize("text", [REFUSED, "something else"])
def test_other_errors_are_the_caller_s(text):
    def run():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text):
        with_compile_lock(run)()


@pytest.mark.slow
def test_a_backward_is_compiled_with_its_forward(monkeypatch):
    """Within the same turn: at the first backward it would be compiled while other lanes run."""
    kinds = []

    def seen(graph, devices):
        kinds.append({node.name.partition("_")[0] for node in graph.find_nodes(op="placeholder")})

    monkeypatch.setattr(own_pass, "products_that_add", seen)
    run = compiled(nn.Linear(5, 7).double(), Options({"force_disable_caches": True}))
    run(torch.randn(3, 5, dtype=torch.float64))
    assert len(kinds) == 2
    assert "tangents" not in kinds[0]
    assert "tangents" in kinds[1]
