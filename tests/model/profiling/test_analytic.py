"""Analytic profiles: order, exact operations and bytes, and models that fit no machine."""

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CostError, UsageError
from penstock.model.capture.capture import capture
from penstock.model.profiling.analytic import analytic
from penstock.model.profiling.device_rates import KNOWN_RATES, Rates
from penstock.model.profiling.measure import measure

FLOAT = 4
FLOPS_ONLY = Rates(flops_per_second=1.0, bytes_per_second=1e30)
BYTES_ONLY = Rates(flops_per_second=1e30, bytes_per_second=1.0)
LAUNCHES_ONLY = Rates(flops_per_second=1e30, bytes_per_second=1e30, launch_seconds=1.0)


def profile_of(model, *shape, **options):
    return analytic(capture(model, torch.randn(*shape)), **options)


def two_linears():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32))


def test_the_operations_of_linear_layers_are_exact():
    profile = profile_of(two_linears(), 4, 8, rates=FLOPS_ONLY)
    small, large = 2 * 4 * 8 * 16, 2 * 4 * 16 * 32
    assert profile.forward == pytest.approx([small, large])
    assert profile.input_grad == pytest.approx([0, large])
    assert profile.weight_grad == pytest.approx([small, large])
    assert (profile.method, profile.batch_size, profile.device) == ("analytic", 4, "given rates")


def test_the_operations_of_convolutions_are_exact():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1))
    profile = profile_of(model, 2, 3, 6, 6, rates=FLOPS_ONLY)
    first, second = 2 * 2 * 36 * 9 * 3 * 8, 2 * 2 * 36 * 9 * 8 * 4
    assert profile.forward == pytest.approx([first, second])
    assert profile.input_grad == pytest.approx([0, second])
    assert profile.weight_grad == pytest.approx([first, second])


def test_bytes_are_what_is_read_and_written():
    profile = profile_of(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Flatten()), 4, 8, rates=BYTES_ONLY)
    one, weight = 4 * 8 * FLOAT, 8 * 8 * FLOAT
    assert profile.forward == pytest.approx([2 * one + weight, 2 * one, 0])
    assert profile.input_grad == pytest.approx([0, 3 * one, 0])
    assert profile.weight_grad == pytest.approx([2 * one + weight + 3 * weight, 0, 0])  # and added to .grad


def test_an_embedding_reads_the_rows_it_returns():
    captured = capture(nn.Embedding(1000, 8), torch.zeros(4, 5, dtype=torch.long))
    profile = analytic(captured, rates=BYTES_ONLY)
    assert profile.forward.tolist() == [2 * 20 * 8 * FLOAT + 20 * 8]


def test_views_are_free_and_launches_count():
    profile = profile_of(
        nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Flatten()), 4, 8, rates=LAUNCHES_ONLY
    )
    assert profile.forward == pytest.approx([1, 0, 0])
    assert profile.input_grad == pytest.approx([0, 0, 0])


def test_larger_products_take_longer():
    model = nn.Sequential(*(nn.Linear(2**k, 2 ** (k + 1)) for k in range(5, 11)))
    for rates in ("cpu", "h100"):
        profile = profile_of(model, 64, 32, rates=rates)
        for column in (profile.forward, profile.input_grad, profile.weight_grad):
            assert (np.diff(column) > 0).all()
    slow, quick = (profile_of(model, 64, 32, rates=name).forward.sum() for name in ("v100", "h100"))
    assert quick < slow


def test_a_larger_batch_takes_longer_and_keeps_more():
    captured = capture(two_linears(), torch.randn(4, 8))
    one, four = analytic(captured, rates=FLOPS_ONLY), analytic(captured, rates=FLOPS_ONLY, batch_size=16)
    assert four.batch_size == 16
    assert four.forward == pytest.approx(4 * one.forward)
    assert four.saved_bytes == pytest.approx(4 * one.saved_bytes)


def tiny_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=16, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 50, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def test_bytes_are_those_that_a_measured_profile_finds():
    captured = capture(*tiny_gpt2())
    with_clock, without = measure(captured, seconds_budget=0.01), analytic(captured)
    assert without.saved_bytes.tolist() == with_clock.saved_bytes.tolist()
    assert without.pending_bytes.tolist() == with_clock.pending_bytes.tolist()


def test_attention_counts_as_one_kernel():
    captured = capture(*tiny_gpt2())
    profile = analytic(captured, rates=FLOPS_ONLY)
    attention = [i for i, node in enumerate(captured.graph.nodes) if node.op == "scaled_dot_product_attention"]
    product = 2 * 2 * 2 * 16 * 16 * 16  # 2 samples, 2 heads, 16 × 16 scores of 16 numbers
    assert profile.forward[attention] == pytest.approx(2 * product)
    assert profile.input_grad[attention] == pytest.approx(5 * product)


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = capture(model, torch.randn(2, 3, 6, 6))
    state = torch.get_rng_state()
    analytic(captured)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_meta_is_never_made():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False) for _ in range(8)))  # 512 GiB
    profile = analytic(capture(model, torch.empty(2, 2**17, device="meta")), rates="h100", batch_size=2**20)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert profile.saved_bytes[0] == 2**20 * 2**17 * FLOAT
    assert profile.forward[0] == pytest.approx(2 * 2**20 * 2**34 / (0.6 * 67e12), rel=1e-3)


@pytest.mark.slow
def test_a_model_of_billions_of_parameters():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=8, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ids = torch.zeros(1, 256, dtype=torch.long)
    profile = analytic(capture(model, {"input_ids": ids}), rates=Rates(1.0, 1e30), batch_size=4)
    products = num_parameters - config.vocab_size * config.hidden_size  # an embedding is looked up
    assert profile.forward.sum() == pytest.approx(2 * products * 4 * 256, rel=0.03)
    assert profile.weight_grad.sum() == pytest.approx(2 * products * 4 * 256, rel=0.03)


def test_progress_is_told():
    seen = []
    profile_of(two_linears(), 4, 8, progress=lambda *told: seen.append(told))
    assert [told[:2] for told in seen] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops_per_second": 0},
        {"bytes_per_second": float("nan")},
        {"bytes_per_second": "fast"},
        {"launch_seconds": -1},
        {"float32_flops_per_second": True},
    ],
    ids=str,
)
def test_wrong_rates_are_refused(wrong):
    with pytest.raises(CostError, match=next(iter(wrong))):
        Rates(**{"flops_per_second": 1.0, "bytes_per_second": 1.0} | wrong)


def test_rates_list_all_faults():
    with pytest.raises(CostError, match=r"flops_per_second: 0 .*; bytes_per_second: -1"):
        Rates(0, -1)


def test_an_unknown_device_gets_a_hint():
    with pytest.raises(UsageError, match="Did you mean 'h100'"):
        profile_of(two_linears(), 4, 8, rates="h10O")


@pytest.mark.parametrize("name", KNOWN_RATES)
def test_known_devices(name):
    rates = Rates.of(name.upper())
    assert rates.seconds(flops=1e15, num_bytes=0) > rates.seconds(flops=1e12, num_bytes=0) > 0


def test_products_in_32_bits_have_a_rate_of_their_own():
    rates = Rates(4.0, 1e30, float32_flops_per_second=1.0)
    assert profile_of(nn.Linear(8, 8), 4, 8, rates=rates).forward.tolist() == [2 * 4 * 64]
    half = nn.Linear(8, 8).to(torch.bfloat16)
    captured = capture(half, torch.zeros(4, 8, dtype=torch.bfloat16))
    assert analytic(captured, rates=rates).forward.tolist() == [2 * 4 * 64 / 4]


def test_rates_can_be_measured():
    rates = Rates.measured("cpu")
    assert rates.flops_per_second > 0
    assert rates.bytes_per_second > 0
    assert rates.launch_seconds > 0


class Noisy(nn.Module):
    """Draws random numbers in its forward, and says no device, as most code for one CPU."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() * (torch.rand(x.shape[0], 1) < 2) + torch.bernoulli(torch.zeros_like(x))
        return x


@pytest.mark.parametrize("path", ["export", "replay"])
def test_random_numbers_in_the_forward_of_a_model_on_meta(path):
    """They came to be on the CPU, where the model was not: "not on the expected device meta"."""
    with torch.device("meta"):
        model = Noisy()
    example, real = torch.randn(6, 8), Noisy()
    options = {"analytic": "cpu", "capture_path": path, "lanes": 2, "timeout": 60}
    with penstock.Pipeline(model, example=example, loss=nn.functional.mse_loss, **options) as pipe:
        pipe.load_state_dict(real.state_dict())
        loss = pipe.step(example, torch.zeros(6, 8))
    torch.testing.assert_close(loss, nn.functional.mse_loss(real(example), torch.zeros(6, 8)).detach())
