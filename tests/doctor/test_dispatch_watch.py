"""Looking at operations: which are found to wait, on which line, and how often."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.doctor.dispatch_watch import DispatchWatch, launches, tensors_of
from penstock.doctor.doctor_report import Kind
from penstock.doctor.gpu_tensors import AssumedGpuTensors, GpuTensors
from penstock.doctor.sightings import Tally
from pretended import PINNED, Pretended, found


def on_device(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def looked_at(run, where=None):
    tally = Tally()
    with DispatchWatch(tally, where or Pretended(), threading.get_ident()):
        run()
    return tally


DEVICE, MASK, REPEATS = on_device(4), torch.tensor([True, False, True, True]), torch.tensor([1, 2, 1, 1])
HOST, PINNED_HOST = torch.ones(4), torch.ones(4, dtype=PINNED)

WAITS = {
    "item": (DEVICE[0].item, Kind.ITEM),
    "float": (lambda: float(DEVICE[0]), Kind.ITEM),
    "int": (lambda: int(DEVICE[0]), Kind.ITEM),
    "bool": (lambda: bool(DEVICE[0]), Kind.ITEM),
    "if": (lambda: 1 if DEVICE.sum() > 0 else 2, Kind.ITEM),
    "format": (lambda: f"{DEVICE[0]}", Kind.ITEM),
    "allclose": (lambda: torch.allclose(DEVICE, DEVICE), Kind.ITEM),
    "equal": (lambda: torch.equal(DEVICE, DEVICE), Kind.ITEM),
    "nonzero": (DEVICE.nonzero, Kind.SHAPE),
    "where": (lambda: torch.where(DEVICE > 1), Kind.SHAPE),
    "masked_select": (lambda: DEVICE.masked_select(MASK), Kind.SHAPE),
    "unique": (DEVICE.unique, Kind.SHAPE),
    "unique_consecutive": (DEVICE.unique_consecutive, Kind.SHAPE),
    "bincount": (REPEATS.bincount, Kind.SHAPE),
    "repeat_interleave": (lambda: DEVICE.repeat_interleave(REPEATS), Kind.SHAPE),
    "mask": (lambda: DEVICE[MASK], Kind.SHAPE),
    "mask of rows": (lambda: on_device(4, 2)[MASK], Kind.SHAPE),
    "write by mask": (lambda: on_device(4).__setitem__(MASK, on_device(3)), Kind.SHAPE),
    "to the host": (lambda: DEVICE.to(HOST.dtype), Kind.TO_HOST),
    "into the host's": (lambda: torch.zeros(4).copy_(DEVICE), Kind.TO_HOST),
    "into the host's, unpinned": (lambda: torch.zeros(4).copy_(DEVICE, non_blocking=True), Kind.TO_HOST),
    "from unpinned": (lambda: HOST.to(DEVICE.dtype), Kind.UNPINNED),
    "from unpinned, at once": (lambda: HOST.to(DEVICE.dtype, non_blocking=True), Kind.UNPINNED),
    "into the device's": (lambda: on_device(4).copy_(HOST), Kind.UNPINNED),
    "a constant": (lambda: torch.tensor([1.0, 2.0], dtype=torch.float64), Kind.UNPINNED),
    "from pinned": (lambda: PINNED_HOST.to(DEVICE.dtype), Kind.BLOCKING),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name):
    run, kind = WAITS[name]
    assert [(k, count) for k, _, count in found(looked_at(run))] == [(kind, 1)]


QUIET = {
    "compute": lambda: DEVICE * 2 + DEVICE.sum(),
    "indices": lambda: DEVICE[REPEATS],
    "a slice": lambda: DEVICE[1:3],
    "where with values": lambda: torch.where(MASK, DEVICE, 0.0),
    "repeat_interleave, told": lambda: DEVICE.repeat_interleave(REPEATS, output_size=5),
    "from pinned, at once": lambda: PINNED_HOST.to(DEVICE.dtype, non_blocking=True),
    "to pinned, at once": lambda: torch.zeros(4, dtype=PINNED).copy_(DEVICE, non_blocking=True),
    "within the host": lambda: HOST.to(torch.bfloat16)[0].item() + 1,
    "within the device": DEVICE.long,
    "a constant of the host": lambda: torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_wait_is_not_found(name):
    assert found(looked_at(QUIET[name])) == []


def test_each_line_is_counted_by_itself():
    def run():
        for _ in range(3):
            DEVICE[0].item()  # one
            DEVICE[1].item(), DEVICE[2].item()  # two

    assert found(looked_at(run)) == [
        (Kind.ITEM, "DEVICE[0].item()  # one", 3),
        (Kind.ITEM, "DEVICE[1].item(), DEVICE[2].item()  # two", 6),
    ]


def test_copies_tell_what_they_copy():
    tally = looked_at(lambda: torch.ones(256, 1024).double())
    (entry,) = tally.entries(None).values()
    assert entry.detail == "(256, 1024), 1 MiB"
    assert entry.blocked_seconds > 0


def test_the_device_is_idle_from_a_wait_to_the_next_launch():
    def idle(run):
        (entry,) = looked_at(run).entries(None).values()
        return entry.idle_seconds

    assert idle(DEVICE[0].item) == 0  # nothing came after
    assert idle(lambda: (DEVICE[0].item(), DEVICE[1:])) == 0  # a view is no work
    assert idle(lambda: (DEVICE[0].item(), HOST + 1)) == 0  # that is work of the host
    assert idle(lambda: (DEVICE[0].item(), DEVICE + 1)) > 0
    # the host need not wait for a copy of its own that it does not wait for
    assert idle(lambda: (HOST.to(DEVICE.dtype, non_blocking=True), DEVICE + 1)) == 0


class Wasteful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()  # in the backward
        return grad


def test_backwards_are_looked_at_too():
    leaf = on_device(4).requires_grad_()
    tally = looked_at(lambda: Wasteful.apply(leaf).sum().backward())
    assert found(tally) == [(Kind.ITEM, "grad.sum().item()  # in the backward", 1)]


def test_an_error_of_an_operation_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shape"):
        looked_at(lambda: DEVICE.reshape(3, 7))


def test_a_mode_that_is_off_notes_nothing():
    tally = Tally()
    mode = DispatchWatch(tally, Pretended(), threading.get_ident())
    mode.is_on = False
    with mode:
        assert DEVICE[0].item() == 1
        assert mode.is_on_top
    assert not mode.is_on_top
    assert found(tally) == []


def test_tensors_are_found_in_lists():
    a, b = torch.zeros(1), torch.ones(1)
    assert [t.item() for t in tensors_of(((a, [b, None, 3]), {"x": a}))] == [0, 1, 0]


def test_views_and_empty_memory_are_no_launches():
    aten = torch.ops.aten
    assert launches(aten.add.Tensor)
    assert launches(aten.add_.Tensor)
    assert not launches(aten.view.default)
    assert not launches(aten.t.default)
    assert not launches(aten.empty.memory_format)


def test_copies_of_a_gpu_are_told_by_the_tensors_themselves():
    """With tensors that have a device and no memory: what a machine without a GPU has that is most like one."""

    def run():
        there, host = torch.ones(4, device="cuda:0"), torch.ones(4)
        there.cpu()
        host.copy_(there)
        host.to("cuda:0")
        host.to("cuda:0", non_blocking=True)
        torch.tensor([1.0, 2.0], device="cuda:0")
        there + there.sum()

    tally = Tally()
    with FakeTensorMode(), DispatchWatch(tally, GpuTensors(), threading.get_ident()):
        run()
    assert found(tally) == [
        (Kind.TO_HOST, "there.cpu()", 1),
        (Kind.TO_HOST, "host.copy_(there)", 1),
        (Kind.UNPINNED, 'host.to("cuda:0")', 1),
        (Kind.UNPINNED, 'host.to("cuda:0", non_blocking=True)', 1),
        (Kind.UNPINNED, 'torch.tensor([1.0, 2.0], device="cuda:0")', 1),
    ]


# ---- reductions

WIDE = torch.zeros(512, 512, dtype=torch.float64)

STRIDED = {
    "softmax": lambda: torch.softmax(WIDE, 0),
    "log_softmax": lambda: torch.log_softmax(WIDE, 0),
    "sum": lambda: WIDE.sum(0),
    "mean, by name": lambda: WIDE.mean(dim=0),
    "max": lambda: WIDE.max(0),
    "argmax": lambda: WIDE.argmax(dim=-2),
    "of a transposed": lambda: WIDE.t().sum(1),
    "in the middle": lambda: WIDE.reshape(16, 32, 512).sum((0, 1)),
    "norm": lambda: torch.linalg.vector_norm(WIDE, dim=0),
}
STRAIGHT = {
    "softmax": lambda: torch.softmax(WIDE, -1),
    "sum": lambda: WIDE.sum(1),
    "all": WIDE.sum,
    "all, by name": lambda: WIDE.sum((0, 1)),
    "with the innermost": lambda: WIDE.reshape(16, 32, 512).sum((0, 2)),
    "of a transposed": lambda: WIDE.t().sum(0),
    "small": lambda: WIDE[:16].sum(0),
    "repeated": lambda: WIDE[:, :1].expand(512, 512).sum(1),
    "of one": lambda: WIDE[None].sum(0),
}


@pytest.mark.parametrize("name", STRIDED)
def test_reductions_over_other_than_the_innermost_are_found(name):
    assert [kind for kind, *_ in found(looked_at(STRIDED[name]))] == [Kind.REDUCTION]


@pytest.mark.parametrize("name", STRAIGHT)
def test_reductions_over_the_innermost_are_not(name):
    assert found(looked_at(STRAIGHT[name])) == []


def test_reductions_of_backwards_are_not_the_user_s():
    weight = torch.zeros(512, dtype=torch.float64, requires_grad=True)
    assert found(looked_at(lambda: (WIDE + weight).sum().backward())) == []


@pytest.mark.parametrize("name", STRIDED)
def test_reductions_can_be_tried_out(name):
    (entry,) = looked_at(STRIDED[name]).entries(None).values()
    assert " over dim " in entry.detail
    told = entry.reduction.try_out()
    assert told is None or told.startswith("takes ")


# ---- without a GPU


def test_without_a_gpu_what_is_made_from_parameters_would_be_on_it():
    weight = torch.nn.Parameter(torch.ones(4))

    def run():
        torch.ones(4).sum().item()  # of data: nobody knows
        output = weight * torch.ones(4)
        output.sum().item()  # yes
        output.detach().sum().item()  # yes, through a view
        with torch.no_grad():
            accuracy = (output.argmax() == 1).float()
        accuracy.item()  # yes, without a gradient

    lines = [code for _, code, _ in found(looked_at(run, AssumedGpuTensors()))]
    assert lines == [
        "output.sum().item()  # yes",
        "output.detach().sum().item()  # yes, through a view",
        "accuracy.item()  # yes, without a gradient",
    ]


def test_a_number_is_written_by_a_mask_without_a_wait():
    """Torch fills by the mask where the value is one number of the host; one of the device must be read."""
    weight = torch.nn.Parameter(torch.ones(4))

    def run():
        output = (weight * 2).detach()
        output[output > 0] = 1.0
        output[output > 0] = output.sum()  # read

    assert [code for _, code, _ in found(looked_at(run, AssumedGpuTensors()))] == [
        "output[output > 0] = output.sum()  # read"
    ]


def test_without_a_gpu_memory_that_is_gone_is_forgotten():
    where = AssumedGpuTensors()
    tensor = torch.ones(4)
    where.mark_results([tensor])
    assert where.is_on_device(tensor[1:])
    del tensor
    where.forget_freed()
    assert not where._marked
    other = torch.ones(4)
    where.mark_results([other])
    where.mark_fetched(other)
    assert not where.is_on_device(other)
