"""Public architectures with small random weights: the checks of benchmarks/coverage, on a few."""

import sys
from pathlib import Path

import pytest

COVERAGE = Path(__file__).parents[3] / "benchmarks" / "coverage"

PLAIN = ["transformer", "lstm_language_model", "unet", "resnet50", "cifar_cnn", "mixture_of_experts"]
PUBLIC = [
    "gpt2",  # tied weights, learned positions
    "llama",  # rotary positions
    "bloom",  # ALiBi
    "mistral",  # sliding window
    "mixtral",  # mixture of experts
    "mamba",  # state space
    "opt",  # control flow on data
    "bert",
    "deberta-v2",
    "t5",  # encoder-decoder, relative positions shared by all layers
    "bart",
    "vit",
    "swin",
    "whisper",  # audio
    "clip",  # two towers
    "idefics2",  # words and images, shapes that depend on data
]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    import torch

    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(COVERAGE))
    yield
    torch.set_num_threads(threads)
    for name in ("worker", "compare", "registry"):
        sys.modules.pop(name, None)


@pytest.mark.sample(5)
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN + PUBLIC)
def test_stages_of_public_architectures_compute_what_the_model_computes(name):
    import worker

    report = worker.report_of(name, "stages")
    assert "error" not in report, report["error"]
    assert len(report["results"]) >= 4
    wrong = {case: text for case, text in report["results"].items() if text != "ok" and not text.startswith("skip")}
    assert not wrong


@pytest.mark.sample(3)
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lstm_time_first", "resnet50", "gpt2", "switch_transformers", "timesfm", "gemma3"])
def test_the_users_path_computes_what_the_model_computes(name):
    """`Pipeline(model, example=…)` with its defaults, then `step`: loss, gradients and buffers."""
    import worker

    report = worker.report_of(name, "ours")
    assert report.get("outcome") == "right", report
