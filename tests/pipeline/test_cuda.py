"""On a GPU: lanes that share it, as threads and as processes, compute what the plain model computes."""

import copy

import pytest
import torch
from torch import nn

import penstock
import processes
from pipelines import WIDTH, data, differences, sequence

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "chimera"]


def wanted_of(model, x, target):
    plain = copy.deepcopy(model)
    loss = nn.functional.mse_loss(plain(x), target)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in plain.named_parameters()}


def faults_on_gpu(name, keep, **options):
    model = sequence().cuda()
    schedule = penstock.schedules.build(name, lanes=2, micro_batches=4)
    cuts = [len(model) * k // schedule.num_stages for k in range(1, schedule.num_stages)]
    x, target = (tensor.cuda() for tensor in data(10))
    wanted = wanted_of(model, x, target)
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, schedule=schedule, cuts=cuts, keep=keep, devices=["cuda:0"] * 2,
        timeout=60, graphs=keep != "offload", **options,
    ) as pipe:  # fmt: skip
        loss = pipe.step(x, target)
        found = [f"{name} {keep}: {d}" for d in differences(pipe, loss.to(wanted[0].device), wanted)]
        host = [tensor.cpu() for tensor in (x, target)]
        pipe.zero_grad()
        loss = pipe.step(*host)  # a batch in host memory goes to the lanes' device
        return found + [f"{name} {keep}, host: {d}" for d in differences(pipe, loss.to(wanted[0].device), wanted)]


@pytest.mark.parametrize("keep", ["hold", "recompute", "offload"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_threads(name, keep):
    assert not faults_on_gpu(name, keep)


def in_process(transport):
    return [fault for name in SCHEDULES for fault in faults_on_gpu(name, "hold", transport=transport)]


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_processes_that_share_the_gpu(transport):
    """Values go through host memory: shared, or pinned for gloo, which cannot send CUDA tensors."""
    assert processes.run(in_process, 2, transport) == [[], []]


def test_autocast_on_the_gpu():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    x, target = torch.randn(8, 64, device="cuda"), torch.randn(8, 64, device="cuda")
    plain = copy.deepcopy(model)
    for a, b in zip(x.split(2), target.split(2), strict=True):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(plain(a), b)
        (loss / 4).backward()
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, cuts=[2], micro_batches=4, devices=["cuda:0"] * 2,
        schedule="zb_h1", autocast=torch.bfloat16,
    ) as pipe:  # fmt: skip
        pipe.step(x, target)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-2 * q.grad.norm()


def test_a_recorded_step_has_the_gpu_s_own_times():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double().cuda()
    x, target = (tensor.cuda() for tensor in data(8))
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, cuts=[2], micro_batches=4, devices=["cuda:0"] * 2
    ) as pipe:
        pipe.step(x, target)
        with pipe.record() as timeline:
            pipe.step(x, target)
    assert 0 < timeline.bubble < 1
    assert timeline.causes.bubble == pytest.approx(timeline.bubble)


class Slow(nn.Module):
    """Keeps the GPU busy for some 20 ms, and the host not at all."""

    def forward(self, x):
        torch.cuda._sleep(40_000_000)
        return x * 1


@pytest.mark.parametrize("graphs", [False, True])
def test_a_recording_shows_when_the_gpu_worked_not_when_it_was_asked_to(graphs):
    model = nn.Sequential(nn.Linear(8, 8), Slow(), nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    x, target = torch.randn(4, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, cuts=[2], micro_batches=2, devices=["cuda:0"] * 2, graphs=graphs
    ) as pipe:
        for _ in range(3):
            pipe.step(x, target)
        with pipe.record() as timeline:
            pipe.step(x, target)
    spans = {str(span.action): span.end - span.start for span in timeline if span.action.kind.value == "F"}
    assert min(spans["0F0"], spans["0F1"]) > 0.01
    assert max(spans["1F0"], spans["1F1"]) < 0.005


class Residual(nn.Module):
    """With what differs between training and evaluation, and a buffer that both change or use."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        if not self.training:
            x = x + torch.arange(WIDTH, device=x.device) * torch.tensor(0.5)
        return x + self.drop(self.norm(self.inner(x)))


class Chained(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("path", ["direct", "export", "replay"])
def test_a_model_of_the_host_is_evaluated_on_the_gpu(path):
    """The evaluation is captured when it is first asked for, and the parameters are on the GPU by then."""
    torch.manual_seed(0)
    model = Chained().double()
    if path == "direct":
        model = nn.Sequential(*model.blocks)
    x, target = data(8)
    with penstock.Pipeline(
        model, example=x.cuda(), loss=nn.functional.mse_loss, micro_batches=4, lanes=2, devices=["cuda:0"] * 2,
        capture_path=path,
    ) as pipe:  # fmt: skip
        for _ in range(4):  # as graphs, in the end
            pipe.step(x, target)
        plain = copy.deepcopy(model).cpu()
        plain.load_state_dict({name: tensor.cpu() for name, tensor in pipe.state_dict().items()})
        plain.eval()
        with torch.no_grad():
            wanted = plain(x)
        loss = pipe.evaluate(x, target)
        assert float(loss) == pytest.approx(float(nn.functional.mse_loss(wanted, target)), rel=1e-10)
        pipe.eval()
        assert torch.allclose(pipe.forward(x).cpu(), wanted, rtol=1e-10)
        pipe.train()
        before = {name: p.data_ptr() for name, p in pipe.named_parameters()}
        pipe.step(x, target)
        assert before == {name: p.data_ptr() for name, p in pipe.named_parameters()}
