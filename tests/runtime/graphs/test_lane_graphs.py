"""Steps as graphs: loss and gradients are the plain model's, in every step, with fresh data and changed weights."""

import copy
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import penstock
from cpu_graphs import CpuGraphs
from penstock.devices.graph_capture import CudaGraphs
from penstock.pipeline import graph_steps
from pipelines import differences

WIDTH = 8
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "chimera", "hanayo"]


needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
_where = {"device": "cpu"}


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch):
    """Real graphs on a GPU; on a CPU some that do the same by hand."""
    _where["device"] = request.param
    monkeypatch.setattr(CpuGraphs, "num_replays", 0)
    if request.param == "cuda":
        monkeypatch.setattr(CudaGraphs, "capturing", counted(CudaGraphs.capturing))
    else:
        monkeypatch.setattr(graph_steps, "has_graphs", lambda device: True)
        monkeypatch.setattr(graph_steps, "CudaGraphs", CpuGraphs)
    return request.param


def counted(capturing):
    """Return the same, with replays counted."""

    @contextmanager
    def around(self, generators):
        with capturing(self, generators) as replay:

            def count():
                CpuGraphs.num_replays += 1
                replay()

            yield count

    return around


def model_of(num_layers=8):
    torch.manual_seed(0)
    layers = []
    for _ in range(num_layers):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers).double().to(_where["device"])


def data(seed, batch=10):
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return (tensor.to(_where["device"]) for tensor in made)


def pipeline(model, schedule="1f1b", keep="hold", micro_batches=4, example=None, **options):
    x, _ = data(0)
    if isinstance(schedule, str):
        schedule = penstock.schedules.build(schedule, lanes=2, micro_batches=micro_batches)
    count = len(list(model)) if isinstance(model, nn.Sequential) else 8
    cuts = [count * k // schedule.num_stages for k in range(1, schedule.num_stages)]
    return penstock.Pipeline(
        model, example=x if example is None else example, loss=nn.functional.mse_loss, schedule=schedule, cuts=cuts,
        keep=keep, timeout=60, devices=[_where["device"]] * 2, **options,
    )  # fmt: skip


def plain(model, x, target):
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.sample(6)
@pytest.mark.parametrize("keep", ["hold", "recompute", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_equals_the_plain_model(schedule, keep):
    """Fresh data each step; the optimizer changes weights in between, and forgets gradients or leaves them."""
    model = model_of()
    reference = copy.deepcopy(model)
    with pipeline(model, schedule, keep, graphs=True) as pipe:
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x, target = data(step)
            wanted = plain(reference, x, target)
            loss = pipe.step(x, target)
            assert not list(differences(pipe, loss, wanted)), step
            ours.step()
            theirs.step()
            if step % 2:  # else gradients add up
                ours.zero_grad(set_to_none=step == 1)
                theirs.zero_grad(set_to_none=step == 1)
    assert CpuGraphs.num_replays


def spread(output, target):
    off = output - target
    return {"loss": off.std(), "largest": off.abs().max()}


@pytest.mark.parametrize("keep", ["hold", "recompute"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_gpipe", "looped_bfs"])
def test_a_loss_over_the_batch_is_captured_with_its_metrics(schedule, keep):
    model, x = model_of(), next(data(0))
    schedule = penstock.schedules.build(schedule, lanes=2, micro_batches=4)
    with penstock.Pipeline(
        model, example=x, loss=spread, schedule=schedule, keep=keep, loss_over="batch", graphs=True,
        cuts=[16 * k // schedule.num_stages for k in range(1, schedule.num_stages)], devices=[_where["device"]] * 2,
    ) as pipe:  # fmt: skip
        for step in range(4):
            x, target = data(step)
            reference = copy.deepcopy(model)
            reference.zero_grad()
            wanted = spread(reference(x), target)
            wanted["loss"].backward()
            pipe.zero_grad()
            loss, metrics = pipe.step(x, target, metrics=True)
            gradients = {name: p.grad for name, p in reference.named_parameters()}
            assert not list(differences(pipe, loss, (wanted["loss"].detach(), gradients))), step
            assert metrics["largest"].item() == pytest.approx(wanted["largest"].item()), step
    assert CpuGraphs.num_replays


def test_batches_of_other_shapes_have_graphs_of_their_own():
    model = model_of()
    with pipeline(model) as pipe:
        for step, batch in enumerate([10, 10, 3, 10, 3, 3, 10, 7]):
            x, target = data(step, batch)
            pipe.zero_grad()
            reference = copy.deepcopy(model)
            reference.zero_grad()
            assert not list(differences(pipe, pipe.step(x, target), plain(reference, x, target))), step
    assert CpuGraphs.num_replays


def test_graphs_are_kept_for_the_most_frequent_shapes(monkeypatch):
    """The first shapes that came kept their graphs for ever, and a frequent one that came later had none."""
    monkeypatch.setattr(graph_steps, "_MOST_SHAPES", 2)
    model = model_of()
    sizes = [10, 10, 3, 3, 7, 7, 7, 7, 7, 10, 10, 10, 3]
    with pipeline(model) as pipe:
        kept = []
        for step, batch in enumerate(sizes):
            x, target = data(step, batch)
            pipe.zero_grad()
            reference = copy.deepcopy(model)
            reference.zero_grad()
            assert not list(differences(pipe, pipe.step(x, target), plain(reference, x, target))), step
            kept.append({sum(key[1]) for key in pipe._steps.graphs._tapes})
    assert kept[3] == kept[7] == {10, 3}
    assert kept[8] == {7, 3}  # before its fifth step 7 has come four times, and 10 twice
    assert kept[-1] == {7, 10}  # and before its fifth 10 has come four times, and 3 twice
    assert all(len(shapes) <= 2 for shapes in kept)


@pytest.mark.parametrize("graphs", [True, False])
def test_lengths_that_change_have_graphs_of_their_own(graphs):
    """A model captured by export, whose programs for other lengths are other ones."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh() + torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] / x.shape[1]
            return x

    model = Model().double().to(_where["device"])

    def sequences(seed, length):
        x, _ = data(seed, 6 * length)
        return x.view(6, length, WIDTH)

    options = {"lanes": 2, "micro_batches": 3, "devices": [_where["device"]] * 2, "graphs": graphs}
    loss = nn.functional.mse_loss
    with penstock.Pipeline(model, example=sequences(0, 5), loss=loss, capture_path="export", **options) as pipe:
        for step, length in enumerate([5, 5, 5, 3, 3, 3, 5, 4, 3, 4, 4, 5]):
            x = sequences(step, length)
            pipe.zero_grad()
            reference = copy.deepcopy(model)
            reference.zero_grad()
            wanted = plain(reference, x, torch.zeros_like(x))
            assert not list(differences(pipe, pipe.step(x, torch.zeros_like(x)), wanted)), step
    assert bool(CpuGraphs.num_replays) == graphs


def test_random_numbers_are_fresh_in_every_replay_and_the_same_when_recomputed():
    torch.manual_seed(0)
    model = (
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)))
        .double()
        .to(_where["device"])
    )
    x, target = data(0)

    def losses(keep, graphs):
        torch.manual_seed(3)
        with pipeline(copy.deepcopy(model), keep=keep, graphs=graphs) as pipe:
            return [float(pipe.step(x, target)) for _ in range(5)]

    eager = losses("hold", False)
    assert len(set(eager)) == 5
    assert losses("hold", True) == pytest.approx(eager, abs=1e-12)
    assert losses("recompute", True) == pytest.approx(eager, abs=1e-12)


def test_weights_that_are_frozen_or_moved_are_captured_anew():
    model = model_of()
    x, target = data(0)
    with pipeline(model) as pipe:
        for step in range(6):
            if step == 3:
                model[0].weight.requires_grad_(False)
            if step == 5:
                model[2].weight.data = model[2].weight.data.clone() * 2
            pipe.zero_grad()
            reference = copy.deepcopy(model)
            reference.zero_grad()
            assert not list(differences(pipe, pipe.step(x, target), plain(reference, x, target))), step


def test_parameters_without_a_gradient_have_none():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.used(x).tanh()

    torch.manual_seed(0)
    model = nn.Sequential(Half(), Half(), Half(), Half()).double().to(_where["device"])
    x, target = data(0)
    with pipeline(model) as pipe:
        for _ in range(4):
            pipe.step(x, target)
        assert all(half.unused.weight.grad is None for half in model)


def test_batch_norm_keeps_its_statistics():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)]
    model = nn.Sequential(*layers).double().to(_where["device"])
    other = copy.deepcopy(model)
    with pipeline(model, graphs=True) as pipe, pipeline(other, graphs=False) as eager:
        for step in range(5):
            x, target = data(step)
            assert torch.allclose(pipe.step(x, target), eager.step(x, target))
        ours, theirs = pipe.state_dict(), eager.state_dict()
        assert all(torch.allclose(ours[name], theirs[name]) for name in theirs)
    assert CpuGraphs.num_replays


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of the compiler's own
@pytest.mark.parametrize("path", ["direct", "export"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compiled_stages(schedule, path, device):
    """On a GPU inside graphs."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers).double().to(device)
    x, _ = data(0)
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, schedule=schedule, cuts=[2] if path == "direct" else (),
        micro_batches=2, devices=[device] * 2, compile=True, capture_path=path, graphs=device == "cuda",
    ) as pipe:  # fmt: skip
        for step in range(4):
            x, target = data(step)
            pipe.zero_grad()
            reference = copy.deepcopy(model)
            reference.zero_grad()
            assert not list(differences(pipe, pipe.step(x, target), plain(reference, x, target))), step


def test_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(_where["device"])
    x, target = (tensor.float() for tensor in data(0))

    def gradients(graphs):
        own = copy.deepcopy(model)
        with pipeline(own, schedule="zb_h1", autocast=torch.bfloat16, graphs=graphs, example=x) as pipe:
            for _ in range(4):
                pipe.zero_grad()
                pipe.step(x, target)
        return [p.grad for p in own.parameters()]

    for ours, eager in zip(gradients(True), gradients(False), strict=True):
        assert (ours - eager).norm() <= 1e-3 * eager.norm()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("around", ["no_grad", "inference_mode", "autocast"])
def test_what_is_around_a_step_does_not_matter(around, lanes):
    torch.manual_seed(0)
    device = _where["device"]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    reference = copy.deepcopy(model)
    x, _ = (tensor.float() for tensor in data(0))
    make = {"autocast": lambda: torch.autocast(device, torch.bfloat16)}.get(around) or getattr(torch, around)
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, devices=[device] * lanes, micro_batches=2, graphs=True
    ) as pipe:
        for step in range(5):
            x, target = (tensor.float() for tensor in data(step))
            pipe.zero_grad()
            reference.zero_grad()
            with make():
                loss = pipe.step(x, target)
            with make() if around == "autocast" else nullcontext():  # which holds for the model too
                wanted = plain(reference, x, target)
            at_most = 2e-2 if around == "autocast" else 1e-5
            assert (loss - wanted[0]).norm() <= at_most * wanted[0].norm()
            for name, p in pipe.named_parameters():
                assert (p.grad - wanted[1][name]).norm() <= at_most * wanted[1][name].norm(), (step, name)
    assert device == "cuda" or CpuGraphs.num_replays


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keep": "offload"}, "offload"),
        ({"deferred_batch_norm": True}, "batch norm"),
        ({"schedule": "pipedream", "optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "within the step"),
    ],
)
def test_what_stands_in_the_way_is_said_once(options, why):
    x, target = data(0)
    with pytest.warns(UserWarning, match=f"no CUDA graphs: .*{why}"):
        pipe = pipeline(model_of(), **options)
    with pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            pipe.step(x, target)
    with pytest.raises(penstock.errors.UsageError, match=why):
        pipeline(model_of(), graphs=True, **options)


def test_hooks_of_parameters_are_not_left_out():
    model, calls = model_of(), []
    model[0].weight.register_hook(lambda grad: calls.append(1))
    x, target = data(0)
    with pipeline(model) as pipe:
        pipe.step(x, target)
        with pytest.warns(UserWarning, match="hooks"):
            pipe.step(x, target)
        count = len(calls)
        pipe.step(x, target)
    assert len(calls) > count


def test_hooks_that_come_after_the_capture_are_called():
    model, calls = model_of(), []
    x, target = data(0)
    with pipeline(model) as pipe:
        for _ in range(3):
            pipe.step(x, target)
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))
        pipe.step(x, target)
        with pytest.warns(UserWarning, match="hooks"):
            pipe.step(x, target)
    assert len(calls) == 8  # micro-batches of two steps


def test_a_model_that_cannot_be_captured_runs_eagerly(monkeypatch, device):
    class Refusing(CpuGraphs):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.tanh.default:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(graph_steps, "CudaGraphs", Refusing)
    model = model_of()
    if device == "cuda":  # there it is the driver that refuses
        monkeypatch.undo()
        model.insert(1, Waiting())
    x, target = data(0)
    wanted = plain(copy.deepcopy(model), x, target)
    with pipeline(model) as pipe:
        pipe.step(x, target)
        pipe.zero_grad()
        with pytest.warns(UserWarning, match=r"not permitted|capturing"):
            loss = pipe.step(x, target)
        assert not list(differences(pipe, loss, wanted))
        pipe.zero_grad()
        assert not list(differences(pipe, pipe.step(x, target), wanted))
        torch.randn(3, device=device)  # what was given up has left nothing behind


class Waiting(nn.Module):
    def forward(self, x):
        return x * (1 + 0 * float(x.detach().sum()))  # the host waits for the number


def test_micro_batches_that_count_differently():
    """Shares change from step to step, with graphs that stay the same."""
    model = model_of()
    # a weight that is not what the loss averages over: the check would refuse it
    with pipeline(model, weight=lambda batch, target: float(target.abs().sum()), check=False) as pipe:
        for step in range(4):
            x, target = data(step)
            pipe.zero_grad()
            reference = copy.deepcopy(model)
            parts = [
                (a, b, b.abs().sum() / target.abs().sum())
                for a, b in zip(x.split([3, 3, 2, 2]), target.split([3, 3, 2, 2]), strict=True)
            ]
            total = sum(nn.functional.mse_loss(reference(a), b) * share for a, b, share in parts)
            reference.zero_grad()
            total.backward()
            wanted = total.detach(), {name: p.grad for name, p in reference.named_parameters()}
            assert not list(differences(pipe, pipe.step(x, target), wanted)), step
    assert CpuGraphs.num_replays


def test_recorded_and_measured_steps():
    x, target = data(0)
    with pipeline(model_of()) as pipe:
        for _ in range(3):
            pipe.step(x, target)
        with pipe.record() as timeline:
            pipe.step(x, target)
        assert 0 < timeline.bubble < 1
        with pipe.record(memory=True) as timeline:
            pipe.step(x, target)
        assert all(timeline.measured_bytes)


def test_graphs_need_a_gpu(monkeypatch):
    monkeypatch.undo()
    _where["device"] = "cpu"
    with pytest.raises(penstock.errors.UsageError, match="GPU"):
        pipeline(model_of(), graphs=True)


def test_a_gradient_scaler():
    """Its factor changes from step to step, and only the device knows it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(_where["device"])

    def course(graphs):
        own = copy.deepcopy(model)
        scaler = torch.amp.GradScaler(_where["device"], init_scale=8.0, growth_interval=2)
        x, target = (tensor.float() for tensor in data(0))
        with pipeline(own, graphs=graphs, scaler=scaler, example=x) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for _ in range(6):
                pipe.step(x, target)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return scaler.get_scale(), [p.detach() for p in own.parameters()]

    (ours, weights), (theirs, wanted) = course(True), course(False)
    assert ours == theirs == 64.0
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, wanted, strict=True))


class Wavering(nn.Module):
    """Uses a layer in all calls but the first few."""

    def __init__(self, skips):
        super().__init__()
        self.layer, self.skips = nn.Linear(WIDTH, WIDTH), skips

    def forward(self, x):
        self.skips -= 1
        return self.layer(x) if self.skips < 0 else x * 1


@pytest.mark.filterwarnings("ignore:no CUDA graphs")
def test_a_capture_that_is_given_up_leaves_no_gradient_behind():
    """A parameter that gets its first gradient in the capture had none before: the step then runs as if never tried."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), Wavering(8), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).double().to(_where["device"])
    x, target = data(0)
    with pipeline(model) as pipe:
        for _ in range(4):
            pipe.zero_grad()
            loss = pipe.step(x, target)
        reference = copy.deepcopy(model)
        reference.zero_grad()
        assert not list(differences(pipe, loss, plain(reference, x, target)))


def test_a_first_step_that_fails_has_warmed_up_nothing():
    model, calls = model_of(), []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("not yet")
        return nn.functional.mse_loss(output, target)

    x, target = data(0)
    wanted = plain(copy.deepcopy(model), x, target)
    schedule = penstock.schedules.build("1f1b", lanes=2, micro_batches=4)
    with penstock.Pipeline(
        model,
        example=x,
        loss=loss,
        schedule=schedule,
        cuts=[8],
        devices=[_where["device"]] * 2,
        graphs=True,
        check=False,  # which would call the loss too
    ) as pipe:
        with pytest.raises(penstock.errors.LaneError, match="not yet"):
            pipe.step(x, target)
        for _ in range(4):
            pipe.zero_grad()
            assert not list(differences(pipe, pipe.step(x, target), wanted))
    assert CpuGraphs.num_replays


def test_frozen_parameters_have_no_gradient():
    model = model_of()
    x, target = data(0)
    with pipeline(model, graphs=True) as pipe:
        for step in range(7):
            if step == 3:
                model[0].weight.requires_grad_(False)
            pipe.zero_grad()
            pipe.step(x, target)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        return nn.functional.mse_loss(output, target) * self.w


def test_a_loss_may_have_parameters():
    model, loss = model_of(), Weighed().to(_where["device"])
    x, target = data(0)
    schedule = penstock.schedules.build("1f1b", lanes=2, micro_batches=4)
    found = []
    with penstock.Pipeline(
        model, example=x, loss=loss, schedule=schedule, cuts=[8], devices=[_where["device"]] * 2, graphs=True
    ) as pipe:
        for _ in range(5):
            loss.w.grad = None
            pipe.step(x, target)
            found.append(float(loss.w.grad))
    assert found == pytest.approx([found[0]] * 5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_capture_that_fails_does_not_keep_memory_from_being_used_again():
    """Torch leaves its allocator in the middle of the capture, and then gives no memory again that two streams used."""
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError), CudaGraphs().capturing(()):
        torch.cuda.synchronize()  # is not allowed within
    torch.cuda.synchronize()
    beside, num_bytes = torch.cuda.Stream(), 1 << 24
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    for _ in range(8):
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        memory.record_stream(beside)
        del memory
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] - before <= 2 * num_bytes
