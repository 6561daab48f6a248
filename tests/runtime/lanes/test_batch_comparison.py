"""Processes are given the same batches, or all of them say that they were not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import penstock
import processes
from penstock.errors import UsageError
from penstock.feeding.sharded_loaders import share_of
from penstock.runtime.lanes import process_lanes as processes_of_lanes
from penstock.runtime.lanes.batch_comparison import Digest, differences
from pipelines import data, expected, sequence
from pipelines import differences as wrong_in


def rows(*given, number=1):
    return Digest(given, number).rows()


def test_digests_of_the_same_are_the_same_and_of_others_are_not():
    torch.manual_seed(0)
    big = torch.randn(64, 32, 32)
    things = {
        "small": torch.arange(6.0), "half": torch.ones(5, dtype=torch.bfloat16), "big": big, "turned": big.mT,
        "bool": torch.tensor([True, False]), "complex": torch.ones(3, dtype=torch.complex64).conj(), "flag": 3,
        "none": torch.zeros(0, 4), "number": torch.tensor(2), "wide": torch.ones(2, dtype=torch.complex128),
        "small float": torch.ones(4).to(torch.float8_e5m2), "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    same = {name: thing.clone() if isinstance(thing, torch.Tensor) else thing for name, thing in things.items()}
    assert not differences([rows(things), rows(same)])
    for name in things.keys() - {"none", "sparse"}:
        other = dict(same)
        other[name] = same[name] + 1 if not isinstance(same[name], torch.Tensor) else (same[name].float() + 1).to(
            same[name].dtype
        ) if not same[name].is_complex() else same[name] * 2  # fmt: skip
        if name == "bool":
            other[name] = ~same[name]
        (told,) = differences([rows(things), rows(other)])
        assert f"batch['{name}'] (" in told
        assert "other values" in told


def test_big_tensors_are_looked_at_all_over_and_elsewhere_each_time():
    """One row of a big batch in another order must show."""
    torch.manual_seed(0)
    batch = torch.randint(50000, (64, 1024))
    for row in range(0, 64, 9):
        other = batch.clone()
        other[row] = torch.randint(50000, (1024,))
        assert differences([rows(batch), rows(other)]), row
    other = batch.clone()
    other[5, 700:708] += 1
    assert any(differences([rows(batch, number=n), rows(other, number=n)]) for n in range(1, 400))


def test_differences_say_what_and_where():
    x, y = torch.ones(4, 2), torch.zeros(4)
    assert not differences([rows(x, y), rows(x, None), rows(x)])  # a lane that needs no target
    assert differences([rows(x, y), rows(x, None), rows(x, y + 1)]) == [
        "target (float32 of shape (4,)) has other values on lane 2 than on lane 0"
    ]
    assert differences([rows((x, x)), rows((x, x.double()))]) == [
        "lane 0 has batch[1] (float32 of shape (4, 2)), lane 1 has batch[1] (float64 of shape (4, 2))"
    ]
    assert differences([rows([x]), rows([x, x])]) == ["the batch has 1 values on lane 0 and 2 on lane 1"]


# ---- processes


def pipe_of(model, x):
    return penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, cuts=[4], micro_batches=4, timeout=30)


def call(pipe, what, batch, target):
    if what == "forward":
        return pipe.forward(batch, gather="last")
    return getattr(pipe, what)(batch, target)


class Late(Digest):
    """As of tensors on a GPU: its values come when somebody waits for them."""

    is_ready = False


def late_process(lanes, *args):
    """Let the digests of some lanes be of tensors on a GPU, as far as anybody can tell."""
    if dist.get_rank() in lanes:
        processes_of_lanes.Digest = Late
    return differing_process(*args)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [(0,), (0, 1)])
@pytest.mark.parametrize("at", [2, 50])
def test_digests_that_are_told_at_the_end_of_a_call(lanes, at):
    for told, number, left in processes.run(late_process, 2, lanes, "step", "target", at):
        assert told.startswith(f"the processes were given different batches: in call {at} target")
        assert number == at + (at == 50)
        assert not left


def differing_process(what, whose, at):
    """Give lane 1 another batch, or target, in one of many calls; then all get the same."""
    model = sequence(4)
    x, target = data(8)
    pipe = pipe_of(model, x)
    told, number = "no error", 0
    try:
        for number in range(1, at + 3):
            is_wrong = number == at and dist.get_rank() == 1
            call(pipe, what, x + (is_wrong and whose == "batch"), target + (is_wrong and whose == "target"))
    except UsageError as error:
        told = str(error)
    pipe.zero_grad()
    left = list(wrong_in(pipe, pipe.step(x, target), expected(model, x, target)))
    pipe.close()
    return told, number, left


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("what", "whose", "at"),
    [
        ("step", "batch", 1),
        ("step", "target", 3),
        ("step", "batch", 50),
        ("evaluate", "target", 2),
        ("forward", "batch", 1),
    ],
)
def test_batches_that_differ_between_processes_end_the_run(what, whose, at):
    """The loss was 16.5 for 0.134, without a word: batches were never compared."""
    for told, number, left in processes.run(differing_process, 2, what, whose, at):
        assert told.startswith(f"the processes were given different batches: in call {at} {whose} (float64 of shape")
        assert "use no DistributedSampler" in told
        assert number == at + (at == 50)  # after the first calls nobody waits for the answer
        assert not left  # usable, when all are given the same


def tolerated_process():
    """Give the first lane no target, which it does not need; let a batch be refused; let a step fail."""
    model = sequence(4)
    x, target = data(8)
    pipe = pipe_of(model, x)
    told = []
    for _ in range(60):
        pipe.zero_grad()
        loss = pipe.step(x, target if dist.get_rank() else None)
        if len(told) < 2:
            try:
                pipe.step(x.float() if dist.get_rank() else x, target)
            except penstock.errors.PenstockError as error:
                told.append(type(error).__name__)
    pipe.zero_grad()
    pipe.evaluate(x, target)
    left = list(wrong_in(pipe, loss := pipe.step(x, target), expected(model, x, target)))
    pipe.close()
    return told, float(loss), left


def test_lanes_without_a_target_and_refused_batches_go_on():
    found = processes.run(tolerated_process, 2)
    assert [told for told, _, _ in found] == [["LaneError"] * 2, ["UsageError"] * 2]
    assert len({loss for _, loss, _ in found}) == 1
    assert not any(left for _, _, left in found)


# ---- loaders that share the data out


class Shard:
    """As accelerate's BatchSamplerShard: its count has another name."""

    num_processes = 2

    def __init__(self, batches):
        self.batch_sampler = batches

    def __iter__(self):
        return iter(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)


class Grudging:
    """A loader of the user's, in which nothing can be looked up."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __iter__(self):
        return iter(())


class Split(list):
    """As a dataset of Hugging Face that was split by node."""

    class _distributed:  # noqa: N801 - as theirs
        rank, world_size = 0, 4


def loaders():
    samples = [(row, row) for row in data(16)[0]]
    own, alone = (DistributedSampler(samples, num_replicas=n, rank=0) for n in (2, 1))
    return {
        "sampler: a DistributedSampler, num_replicas=2": DataLoader(samples, sampler=own, batch_size=8),
        "batch_sampler.sampler: a DistributedSampler, num_replicas=2": DataLoader(
            samples, batch_sampler=BatchSampler(own, 8, drop_last=False)
        ),
        "batch_sampler: a Shard, num_processes=2": DataLoader(samples, batch_sampler=Shard([[0, 1]])),
        "dataset: a Split that is split by node, world_size=4": DataLoader(Split(samples), batch_size=8),
    }, [DataLoader(samples, sampler=alone, batch_size=8), DataLoader(samples, 8, shuffle=True), samples, Grudging()]


def test_what_shares_out_data_is_recognised():
    sharing, whole = loaders()
    for told, loader in sharing.items():
        assert share_of(loader) == told
    assert [share_of(loader) for loader in whole] == [""] * len(whole)


def sharing_process(folder):
    x, _ = data(8)
    pipe = pipe_of(sequence(4), x)
    (loader, *_), (fine, *_) = loaders()[0].values(), loaders()[1]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    told = []
    for make in (
        lambda: penstock.feed(loader, pipe),
        lambda: penstock.Trainer(pipe, optimizer, loader, steps=1, folder=folder),
        lambda: penstock.Trainer(pipe, optimizer, penstock.feed(loader, device="cpu"), steps=1, folder=folder),
        lambda: penstock.Trainer(pipe, optimizer, fine, steps=1, folder=folder, validation=loader),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        told.append(str(caught.value))
    losses = [float(pipe.step(*item)) for item in penstock.feed(fine, pipe)]
    pipe.close()
    return told, losses


def test_a_loader_that_shares_out_data_is_refused_before_the_first_step(tmp_path):
    """The guide named DistributedSampler as something to use; each lane then had other samples than the next."""
    for told, losses in processes.run(sharing_process, 2, tmp_path):
        assert [text.partition(":")[0] for text in told] == ["loader", "data", "data", "validation"]
        assert all("a DistributedSampler, num_replicas=2" in text for text in told)
        assert all("Do not shard" in text for text in told)
        assert len(losses) == 2


def test_in_one_process_a_share_of_the_data_is_the_user_s_own_affair():
    x, _ = data(8)
    loader = next(iter(loaders()[0].values()))
    model = sequence(4)
    with penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, cuts=[4], micro_batches=4, lanes=2) as pipe:
        assert len([pipe.step(*item) for item in penstock.feed(loader, pipe)]) == 1
