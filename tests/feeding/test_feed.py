"""feed: the loader's own batches in its own order, pulled ahead but never too far, and nothing left behind."""

import copy
import gc
import json
import random
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import penstock
import processes
from penstock.errors import UsageError
from penstock.feeding import item_source
from penstock.feeding import pinned_staging as staging
from penstock.feeding.feed import Feed
from penstock.feeding.item_carrier import Destinations, destinations_of
from pipelines import WIDTH, Knotty, data, sequence

CPU = torch.device("cpu")


def wait_until(is_so, seconds=20):
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "penstock-feed"]


@pytest.fixture(autouse=True)
def no_worker_is_left():
    assert not workers()
    yield
    wait_until(lambda: not workers())


class Counting:
    """A loader that knows how much was pulled, in how many epochs."""

    def __init__(self, count=10, fails_at=None):
        self.count, self.fails_at = count, fails_at
        self.pulled, self.epochs = 0, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.epochs += 1
        for number in range(self.count):
            if number == self.fails_at:
                raise KeyError("the loader's own")
            self.pulled += 1
            yield torch.full((2,), float(number)), number


def numbers(batches):
    return [number for _, number in batches]


# ---- order, and how far ahead


def test_batches_come_in_order_from_a_thread_of_their_own():
    seen = []

    def loader():
        for number in range(20):
            seen.append(threading.current_thread().name)
            yield number

    assert list(penstock.feed(loader(), device="cpu", thread=True)) == list(range(20))
    assert set(seen) == {"penstock-feed"}


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_loader_is_a_bounded_number_of_batches_in_front(ahead):
    loader, given = Counting(30), 0
    for _ in penstock.feed(loader, device="cpu", ahead=ahead, thread=True):
        given += 1
        # so many wait, and one more is in the worker's hands
        wait_until(lambda: loader.pulled == min(30, given + ahead + 1))  # noqa: B023 - called at once
        time.sleep(0.002)
        assert loader.pulled <= given + ahead + 1
    assert given == 30


def test_nothing_is_pulled_before_the_first_batch_is_asked_for():
    loader = Counting()
    batches = iter(penstock.feed(loader, device="cpu"))
    assert loader.pulled == loader.epochs == 0
    next(batches)
    assert loader.pulled >= 1


class Thing:
    """Counts how many of it there are."""

    alive = 0

    def __init__(self):
        Thing.alive += 1

    def __del__(self):
        Thing.alive -= 1


def test_a_batch_that_was_used_is_not_held():
    """Neither the worker nor the channel keeps what the user has let go of."""
    most = 0
    for _ in penstock.feed(iter(Thing, None), device="cpu", ahead=3, thread=True):
        time.sleep(0.002)
        most = max(most, Thing.alive)
        if most == 5 and Thing.alive == 5:
            break
    assert most == 5  # the user's, three that wait, and one in the worker's hands
    del _
    assert Thing.alive == 0


def test_a_batch_that_was_used_is_not_held_while_the_loader_makes_the_next():
    go_on = threading.Event()

    def loader():
        yield Thing()
        go_on.wait()

    with penstock.feed(loader(), device="cpu", thread=True) as batches:
        under_way = iter(batches)
        thing = next(under_way)
        assert Thing.alive == 1
        del thing
        wait_until(lambda: Thing.alive == 0)
        go_on.set()
        assert list(under_way) == []


def test_len_is_the_loader_s():
    assert len(penstock.feed(Counting(7), device="cpu")) == 7
    with pytest.raises(TypeError, match="has no len"):
        len(penstock.feed(iter([]), device="cpu"))


def test_structures_and_what_is_no_tensor_pass_unchanged():
    items = [
        {"ids": torch.arange(4), "name": "a", "more": [torch.ones(2), None]},
        (torch.zeros(3), "b"),
        [torch.zeros(3), {"c": 1.5}],
        "text",
        None,
        7,
    ]
    found = list(penstock.feed(items, device="cpu"))
    assert all(one is other for one, other in zip(found, items, strict=True))


def test_split_makes_a_batch_and_its_target():
    rows = [{"x": torch.full((2,), float(n)), "y": n} for n in range(3)]
    found = list(penstock.feed(rows, device="cpu", split=lambda row: (row["x"], row["y"])))
    assert [target for _, target in found] == [0, 1, 2]
    assert all(float(batch[0]) == target for batch, target in found)


# ---- what goes wrong


def test_an_error_of_the_loader_comes_where_its_batch_would_have_come():
    found = []
    with pytest.raises(KeyError, match="the loader's own") as caught:
        found.extend(penstock.feed(Counting(fails_at=3), device="cpu", ahead=5))
    assert numbers(found) == [0, 1, 2]
    told = "".join(traceback.format_exception(caught.value))
    assert "raise KeyError" in told  # the line in the loader
    assert "test_an_error_of_the_loader" in told  # and the user's own


def test_after_an_error_there_is_nothing_more_until_the_next_epoch():
    loader = Counting(4, fails_at=2)
    feed = penstock.feed(loader, device="cpu")
    batches = iter(feed)
    next(batches), next(batches)
    with pytest.raises(KeyError):
        next(batches)
    assert list(batches) == []
    assert place_of(feed) == (0, 2)
    loader.fails_at = None
    assert numbers(feed) == [0, 1, 2, 3]


class Unready:
    def __iter__(self):
        raise OSError("no such file")


def wrong_split(item):
    return item[0]


def stopping_split(item):
    raise StopIteration


@pytest.mark.parametrize(
    ("loader", "split", "error", "message"),
    [
        (Unready(), None, OSError, "no such file"),
        (Counting(), wrong_split, UsageError, r"split: must return \(batch, target\); returned: Tensor"),
        (Counting(), stopping_split, RuntimeError, "raised StopIteration"),
        (Counting(), lambda item: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_errors_of_the_beginning_and_of_split(loader, split, error, message):
    with pytest.raises(error, match=message):
        list(penstock.feed(loader, device="cpu", split=split))


def test_wrong_arguments_get_one_message_with_all_that_is_wrong():
    with pytest.raises(UsageError) as caught:
        penstock.feed(5, nn.Linear(1, 1), ahead=0, split=3)
    told = str(caught.value)
    assert "loader: expected a DataLoader or another iterable; given: 5" in told
    assert "pipe: expected a penstock.Pipeline; without a pipeline, pass device=; given: Linear" in told
    assert "ahead: must be a whole number of at least 1; given: 0" in told
    assert "split: expected a function" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "given: neither"),
        ({"device": "cpu", "ahead": True}, "ahead"),
        ({"device": "cpu", "ahead": 1.5}, "ahead"),
        ({"device": "gpu"}, "device: 'gpu' cannot be used"),
        ({"device": "meta"}, "device: the meta device cannot run anything"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        penstock.feed([], **options)


def test_a_class_is_no_loader():
    with pytest.raises(UsageError, match="loader: "):
        penstock.feed(DataLoader, device="cpu")


# ---- ends


def stop_by_break(feed):
    for _ in feed:
        break


def stop_by_error(feed):
    try:
        for _ in feed:
            raise ValueError("in training")
    except ValueError as error:
        return error  # whoever holds the error does not hold the feed
    return None


def stop_by_close(feed):
    for _ in feed:
        feed.close()


def stop_by_context(feed):
    with feed as batches:
        return next(iter(batches)), feed


def stop_by_collection(feed):
    batches = iter(feed)
    next(batches)
    del batches


def stop_by_cycle(feed):
    batches = iter(feed)
    next(batches)
    ring = [batches]
    ring.append(ring)
    del batches, ring
    gc.collect()


def stop_by_end(feed):
    list(feed)


STOPS = [
    stop_by_break, stop_by_error, stop_by_close, stop_by_context, stop_by_collection, stop_by_cycle, stop_by_end,
]  # fmt: skip


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
def test_no_thread_is_left_behind(stop):
    feed = penstock.feed(Counting(50), device="cpu")
    held = stop(feed)
    assert not workers()  # at once: the worker was waited for
    del held


def test_a_generator_of_the_user_s_is_closed_with_its_loop():
    ended = []

    def rows():
        try:
            yield from range(10)
        finally:
            ended.append(True)

    class Loader:
        def __iter__(self):
            return rows()

    for _ in penstock.feed(Loader(), device="cpu"):
        break
    assert ended == [True]


def test_a_loader_that_never_returns_is_left_to_itself(monkeypatch):
    monkeypatch.setattr(item_source, "_GRACE_SECONDS", 0.05)
    go_on = threading.Event()

    def loader():
        yield 1
        go_on.wait()
        yield 2

    with penstock.feed(loader(), device="cpu", thread=True) as batches:
        assert next(iter(batches)) == 1
    assert len(workers()) == 1
    go_on.set()


def test_a_loader_that_never_returns_does_not_keep_the_process_alive():
    code = """
import threading, penstock
from penstock.feeding import item_source
item_source._GRACE_SECONDS = 0.1
def loader():
    yield 1
    threading.Event().wait()
for batch in (batches := iter(penstock.feed(loader(), device="cpu", thread=True))):
    break
print("got", batch)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "got 1\n", "")


@pytest.mark.parametrize("thread", [True, False, "auto"])
def test_close_wakes_a_user_who_waits(thread):
    go_on = threading.Event()

    def loader():
        yield 1
        go_on.wait()

    feed = penstock.feed(loader(), device="cpu", thread=thread)
    found = []
    user = threading.Thread(target=lambda: found.extend(feed))
    user.start()
    wait_until(lambda: found == [1])
    threading.Timer(0.1, go_on.set).start()
    feed.close()
    user.join(20)
    assert not user.is_alive()


# ---- epochs


def test_each_iteration_is_an_epoch():
    loader = Counting(3)
    feed = penstock.feed(loader, device="cpu")
    for epoch in range(3):
        assert feed.epoch == epoch
        assert numbers(feed) == [0, 1, 2]
    assert loader.epochs == 3


def test_an_epoch_that_is_broken_off_counts():
    feed = penstock.feed(Counting(5), device="cpu")
    for _, number in feed:
        if number == 1:
            break
    assert place_of(feed) == (0, 2)
    assert numbers(feed) == [0, 1, 2, 3, 4]
    assert place_of(feed) == (2, 0)


def test_a_second_iteration_replaces_the_first():
    feed = penstock.feed(Counting(5), device="cpu")
    first, second = iter(feed), iter(feed)
    next(first), next(second)
    with pytest.raises(UsageError, match="another iteration"):
        next(first)
    assert numbers(second) == [1, 2, 3, 4]
    assert list(second) == []


def test_a_new_epoch_waits_for_a_worker_that_is_still_in_the_loader(monkeypatch):
    """It was left to itself, after a while; two threads in one loader would be in each other's way."""
    monkeypatch.setattr(item_source, "_GRACE_SECONDS", 0.001)
    inside, most = [], []

    class Slow:
        def __iter__(self):
            for number in range(3):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.05)
                inside.pop()
                yield number

    feed = penstock.feed(Slow(), device="cpu")
    for _ in range(3):
        for _ in feed:
            break
    assert list(feed) == [0, 1, 2]
    assert max(most) == 1


def test_a_sampler_is_told_the_epoch():
    rows = TensorDataset(torch.arange(8))
    loader = DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows, num_replicas=2, rank=0, seed=3))
    wanted = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        wanted.append([batch.tolist() for (batch,) in loader])
    assert wanted[0] != wanted[1]
    feed = penstock.feed(loader, device="cpu")
    assert [[batch.tolist() for (batch,) in feed] for _ in range(3)] == wanted


# ---- states


class Stateful:
    """Shuffles with a generator of its own, and can say where it is; the state is its own list, which it changes."""

    def __init__(self, count=6):
        self.state = [0, 0]  # the epoch, and what it has given of it
        self.count = count

    def __iter__(self):
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.state[0])).tolist()
        while self.state[1] < self.count:
            self.state[1] += 1
            yield order[self.state[1] - 1]
        self.state[:] = [self.state[0] + 1, 0]

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = list(state["state"])


class Shuffled:
    """A loader without a state, whose order follows from the epoch that its sampler is told."""

    def __init__(self, count=6):
        self.sampler, self.count = self, count
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()


def place_of(feed):
    state = feed.state_dict()
    return state["epoch"], state["batches"]


def take(feed, count):
    """Return so many items, over several epochs, each with its epoch's number."""
    found = []
    while len(found) < count:
        for item in feed:
            found.append((feed.epoch, item))
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("kind", [Stateful, Shuffled])
@pytest.mark.parametrize("at", range(14))
def test_a_state_goes_on_behind_the_batches_that_were_handed_out(kind, at):
    """After each batch of two epochs: what was pulled ahead, but not handed out, comes again."""

    whole = take(penstock.feed(kind(), device="cpu"), 18)
    feed = penstock.feed(kind(), device="cpu", ahead=3)
    found = take(feed, at)
    state = json.loads(json.dumps(feed.state_dict()))
    assert (state["epoch"], state["batches"]) == ((at - 1) // 6, (at - 1) % 6 + 1) if at else (0, 0)
    resumed = penstock.feed(kind(), device="cpu", ahead=3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert found + take(resumed, 18 - at) == whole


@pytest.mark.parametrize("kind", [Stateful, Shuffled])
def test_a_state_between_epochs(kind):
    feed = penstock.feed(kind(), device="cpu")
    list(feed)
    state = json.loads(json.dumps(feed.state_dict()))
    assert (state["epoch"], state["batches"]) == (1, 0)
    other = penstock.feed(kind(), device="cpu")
    other.load_state_dict(state)
    assert list(other) == list(feed)
    assert other.state_dict() == feed.state_dict()


class Shuffling:
    """A loader that shuffles by Python's own numbers, or by numpy's."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        order = list(range(6))
        self.shuffle(order)
        yield from order


def shuffling(kind):
    numbers = torch.arange(6)
    if kind == "python":
        return Shuffling(random.shuffle)
    if kind == "numpy":
        return Shuffling(numpy.random.shuffle)
    own = torch.Generator().manual_seed(3) if kind == "own" else None
    return DataLoader(numbers, batch_size=None, shuffle=True, generator=own)


@pytest.mark.parametrize("at", [0, 1, 4, 6, 7, 11, 12])
@pytest.mark.parametrize("kind", ["torch", "own", "python", "numpy"])
def test_an_order_that_was_drawn_at_the_start_of_an_epoch_is_drawn_again(kind, at):
    """Every sample once an epoch, also where it was broken off; and what the user draws meanwhile is the same too."""

    seed_all()
    whole = draw_with(penstock.feed(shuffling(kind), device="cpu"), 18)
    seed_all()
    feed = penstock.feed(shuffling(kind), device="cpu", ahead=3)
    found = draw_with(feed, at)
    state = json.loads(json.dumps(feed.state_dict()))
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    seed_all(1)  # another process, another moment
    resumed = penstock.feed(shuffling(kind), device="cpu", ahead=3)
    resumed.load_state_dict(state)
    torch.set_rng_state(generators[0]), random.setstate(generators[1]), numpy.random.set_state(generators[2])
    later = draw_with(resumed, 18 - at)
    assert found + later == whole
    items = [item for item, _, _ in found + later]
    assert all(sorted(items[epoch : epoch + 6]) == list(range(6)) for epoch in (0, 6, 12))


def draw_with(feed, count):
    """Return so many items, each with what a step would draw beside it."""
    found = []
    while len(found) < count:
        for item in feed:
            found.append((int(item), torch.rand(()).item(), random.random()))
            if len(found) == count:
                break
    return found


def seed_all(seed=0):
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)


def test_a_state_whose_random_states_cannot_be_read():
    feed = penstock.feed(Counting(4), device="cpu")
    next(iter(feed))
    state = feed.state_dict()
    state["draws"] = {"torch": "!", "python": [], "own": []}
    other = penstock.feed(Counting(4), device="cpu")
    before, place = torch.get_rng_state(), other.state_dict()
    with pytest.raises(UsageError, match="random states cannot be read"):
        other.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert other.state_dict() == place


def test_loading_a_state_ends_the_iteration_under_way():
    feed = penstock.feed(Counting(6), device="cpu")
    for _, number in feed:
        if number == 1:
            state = feed.state_dict()
        if number == 4:
            feed.load_state_dict(state)
    assert feed.state_dict() == state
    assert numbers(feed) == [2, 3, 4, 5]


@pytest.mark.parametrize("state", [None, {}, {"epoch": 0}, {"epoch": -1, "batches": 0}, {"epoch": 0, "batches": "2"}])
def test_what_is_no_state(state):
    with pytest.raises(UsageError, match="state: expected the result of a feed's state_dict"):
        penstock.feed(Counting(), device="cpu").load_state_dict(state)


def test_a_state_of_another_loader():
    feed = penstock.feed(Counting(3), device="cpu")
    with pytest.raises(UsageError, match="this loader has no load_state_dict"):
        feed.load_state_dict(penstock.feed(Stateful(), device="cpu").state_dict())
    state = {"epoch": 0, "batches": 5, "loader": None}
    with pytest.raises(UsageError, match="an epoch of 5 batches or more; the loader has 3"):
        feed.load_state_dict(state)
    assert place_of(feed) == (0, 0)
    unknown = penstock.feed(Shuffled(3), device="cpu")  # which does not know its length
    unknown.load_state_dict(state)
    with pytest.raises(UsageError, match="an epoch of 5 batches or more; the loader has 3"):
        list(unknown)


def test_a_state_of_a_loader_with_generators_of_its_own_is_refused_before_anything_changes():
    """In the middle of an epoch too, where it was noticed only when the next batch was asked for."""
    feed = penstock.feed(shuffling("own"), device="cpu")
    batches = iter(feed)
    next(batches)
    state = json.loads(json.dumps(feed.state_dict()))
    batches.close()
    other = penstock.feed(shuffling("torch"), device="cpu")
    under_way = iter(other)
    next(under_way)
    with pytest.raises(UsageError, match="had 1 own generators and now has 0"):
        other.load_state_dict(state)
    assert place_of(other) == (0, 1)
    assert len(list(under_way)) == 5


class Sharing:
    """A loader with a generator from which the user draws too, between the batches.

    Unless it draws all along itself, as with replacement: then nobody could draw its order again.
    """

    def __init__(self, replacement):
        self.is_shared = not replacement
        self.generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(range(40), replacement=replacement, num_samples=40, generator=self.generator)
        self.loader = DataLoader(torch.arange(40), batch_size=4, sampler=sampler, generator=self.generator)
        self.feed = penstock.feed(self.loader, device="cpu", thread=True)

    def run(self, count):
        """Return batches, each with what the user draws beside it, when the loader is as far ahead as it may be."""
        found = []
        while len(found) < count:
            for batch in self.feed:
                given = self.feed.state_dict()["batches"]
                ahead = min(given + 3, 11)  # two that wait and one in the worker's hands; the end is one more
                wait_until(lambda: self.feed._pulls._count >= ahead)  # noqa: B023 - called at once
                own = self.generator if self.is_shared else None
                found.append((batch.tolist(), self.is_shared and int(torch.randint(1 << 30, (), generator=own))))
                if len(found) == count:
                    break
        return found


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("at", [1, 4, 8, 9, 10, 13, 20])
def test_a_generator_that_is_not_the_loader_s_alone_goes_on_where_it_was(replacement, at):
    """One generator for two loaders, as an example: it was set back to the start of the epoch, and left there."""
    whole = Sharing(replacement).run(26)
    first = Sharing(replacement)
    found = first.run(at)
    state = json.loads(json.dumps(first.feed.state_dict()))
    second = Sharing(replacement)
    second.generator.manual_seed(5)
    second.feed.load_state_dict(state)
    assert second.feed.state_dict() == state
    assert found + second.run(26 - at) == whole


def test_a_state_of_before_there_was_a_now_still_loads():
    whole = take(penstock.feed(shuffling("own"), device="cpu", thread=True), 12)
    feed = penstock.feed(shuffling("own"), device="cpu", thread=True)
    found = take(feed, 4)
    state = feed.state_dict()
    assert state.pop("pulled") >= 4
    assert state.pop("now")["own"]
    other = penstock.feed(shuffling("own"), device="cpu", thread=True)
    other.load_state_dict(state)
    assert found + take(other, 8) == whole


# ---- real loaders and pipelines


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_real_loader_gives_what_it_would_give_and_draws_what_it_would_draw(num_workers):
    """The order is drawn from torch's own generator, from which the user draws too."""
    rows = TensorDataset(torch.arange(24), torch.arange(24) * 2)
    loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=num_workers)

    def run(batches):
        torch.manual_seed(5)
        return [(x.tolist(), y.tolist(), float(torch.rand(()))) for _ in range(2) for x, y in batches]

    assert run(penstock.feed(loader, device="cpu")) == run(loader)


def test_workers_that_stay_for_the_next_epoch():
    """The loader's one iterator is begun anew, when nobody is in it any more."""
    rows = TensorDataset(torch.arange(24))
    loader = DataLoader(rows, batch_size=2, num_workers=2, persistent_workers=True)
    feed = penstock.feed(loader, device="cpu")
    for _ in range(3):
        for (x,) in feed:
            if int(x[0]) == 4:
                break
        assert torch.cat([x for (x,) in feed]).tolist() == list(range(24))
    del loader, feed
    gc.collect()


class Returns(nn.Module):
    """Returns its own loss, from a batch that is a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, rows, labels):
        return ((self.second(self.drop(torch.tanh(self.first(rows)))) - labels) ** 2).mean()


@pytest.fixture(scope="module")
def rows():
    return [tensor.float() for tensor in data(48)]


def train(model, loader, example, through, **options):
    with penstock.Pipeline(model, example=example, micro_batches=4, lanes=2, cuts=[2], timeout=30, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            for item in through(loader, pipe):
                losses.append(pipe.step(item) if isinstance(item, dict) else pipe.step(*item))
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses)


def test_training_has_the_losses_that_it_would_have(rows):
    loader = DataLoader(TensorDataset(*rows), batch_size=10, shuffle=True)  # the last batch is smaller
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
    found, wanted = (
        train(copy.deepcopy(model), loader, rows[0][:10], through, loss=nn.MSELoss())
        for through in (penstock.feed, lambda loader, pipe: loader)
    )
    assert len(found) == 10
    assert torch.equal(found, wanted)


def test_training_with_dicts(rows):
    keys = ("rows", "labels")
    loader = [dict(zip(keys, pair, strict=True)) for pair in zip(*(t.split(12) for t in rows), strict=True)]
    found, wanted = (train(Returns(), loader, loader[0], through) for through in (penstock.feed, lambda l, p: l))
    assert len(found) == 8
    assert torch.equal(found, wanted)


def train_in_process():
    """Train two epochs, each process with a feed of its own over the same batches."""
    pairs = [tuple(data(8, seed=seed)) for seed in range(3)]
    with penstock.Pipeline(
        sequence(4), example=pairs[0][0], loss=nn.functional.mse_loss, micro_batches=4, lanes=2, cuts=[4], timeout=30
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            for batch, target in penstock.feed(pairs, pipe):
                losses.append(float(pipe.step(batch, target)))
                optimizer.step()
                optimizer.zero_grad()
        return losses


def test_each_process_has_a_feed_of_its_own():
    wanted = pytest.approx(train_in_process(), rel=1e-12)
    assert processes.run(train_in_process, 2) == [wanted, wanted]


# ---- where tensors go


class Late(nn.Module):
    """Takes what only its last layer uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, late, *, scale):
        for layer in self.layers[:-1]:
            x = layer(x) * scale
        return self.layers[-1](x) + late


GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def places(model, example, monkeypatch, *, lanes=None, devices=GPUS, is_split=False, **options):
    """Return the places of a pipeline as if its lanes were on GPUs."""
    with penstock.Pipeline(model, example=example, micro_batches=2, timeout=30, lanes=2, **options) as pipe:
        monkeypatch.setattr(pipe, "devices", devices)
        if lanes is not None:
            monkeypatch.setattr(pipe.internals.group, "lanes", lanes)
        return destinations_of(pipe, is_split=is_split)


LATE = {"x": torch.ones(4, WIDTH), "late": torch.ones(4, WIDTH), "scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    ("lanes", "wanted"),
    [
        (None, [0, 1, 0, 1]),
        ((0,), [0, None, 0, None]),  # of two processes, the one with the first stage
        ((1,), [None, 1, None, 1]),
    ],
)
def test_tensors_go_to_the_lane_that_uses_them(lanes, wanted, monkeypatch):
    found = places(Late(), LATE, monkeypatch, lanes=lanes, loss=nn.MSELoss(), cuts=["layers.3"])
    target = torch.zeros(4, WIDTH)
    tensors, _, devices = found.assign((LATE, target))
    assert all(one is other for one, other in zip(tensors, [*LATE.values(), target], strict=True))
    assert devices == [None if at is None else GPUS[at] for at in wanted]
    assert found.devices == tuple(GPUS if lanes is None else [GPUS[lanes[0]]])


def test_a_batch_with_nested_things_in_another_order(monkeypatch):
    found = places(Late(), LATE, monkeypatch, loss=nn.MSELoss(), cuts=["layers.3"])
    batch = {key: LATE[key] for key in ("late", "scale", "x")}
    assert found.assign([batch, {"a": [torch.ones(4), "text"], "b": torch.ones(4)}])[2] == [
        GPUS[at] for at in (1, 0, 0, 1, 1)
    ]
    # not like the example, as the step will say; what is there goes where it belongs
    assert found.assign((LATE["x"], torch.ones(4)))[2] == GPUS


def test_inputs_that_several_lanes_use_go_to_the_first(monkeypatch):
    example = (data(4)[0], torch.tensor(0.9, dtype=torch.float64))
    found = places(Knotty(), example, monkeypatch, loss=nn.functional.mse_loss)
    assert found.assign((example, example[0]))[2] == [GPUS[0], GPUS[0], GPUS[1]]


def test_two_ways(monkeypatch):
    """Where micro-batches go both ways, the first way's lanes decide; a process alone has an end of each."""
    example = data(4)[0]
    options = {"loss": nn.MSELoss(), "schedule": "chimera"}
    assert places(sequence(4), example, monkeypatch, **options).assign((example, example))[2] == GPUS
    alone = places(sequence(4), example, monkeypatch, lanes=(1,), **options)
    assert alone.assign((example, example))[2] == [GPUS[1], GPUS[1]]


def test_one_gpu_and_none(monkeypatch):
    example = data(4)[0]
    assert places(sequence(4), example, monkeypatch, devices=[CPU, CPU]) == Destinations()
    assert places(sequence(4), example, monkeypatch, devices=GPUS[:1] * 2) == Destinations((GPUS[0],))
    mixed = places(sequence(4), example, monkeypatch, devices=[GPUS[0], CPU], loss=nn.MSELoss())
    assert mixed.assign((example, example))[2] == [GPUS[0], None]


# ---- staging, on a stand-in for a GPU


class FakeStream:
    def __init__(self, device=None, name="copies"):
        self.name, self.waits_for = name, []

    def wait_event(self, event):
        self.waits_for.append(event)


class FakeEvent:
    """Is over at once, but for those of the user's stream: these when the test says so."""

    held = None  # a list of those that are not over, where they are held back

    def __init__(self, blocking=False):
        assert blocking
        self.over = threading.Event()

    def record(self, stream):
        if stream.name == "user" and FakeEvent.held is not None:
            FakeEvent.held.append(self)
        else:
            self.over.set()

    def synchronize(self):
        assert threading.current_thread().name == "penstock-feed"  # the user never waits
        self.over.wait()


@pytest.fixture
def fake_gpu(monkeypatch):
    """Let the CPU play a GPU; yields the pinned memory that was made."""
    made = []

    def pinned(num_bytes):
        made.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return made[-1]

    user = FakeStream(name="user")
    monkeypatch.setattr(staging, "pinned", pinned)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(staging, "OnStream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: user)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(FakeEvent, "held", None)
    return made


def fake_feed(loader, **options):
    return Feed(loader, Destinations((CPU,)), **{"ahead": 2, "split": None, **options})


def odd_things(number):
    """Return tensors of many kinds."""
    torch.manual_seed(number)
    whole = torch.randn(4, 3, 8, 8)
    return {
        "plain": whole,
        "channels last": whole.to(memory_format=torch.channels_last),
        "turned": whole.transpose(1, 3),
        "with gaps": whole[:, ::2, 1:],
        "repeated": whole[:1].expand(5, 3, 8, 8),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "one number": torch.tensor(float(number)),
        "none": torch.empty(0, 3),
        "bits": whole > 0,
        "bytes": torch.randint(255, (7,), dtype=torch.uint8),
        "half": whole.bfloat16(),
        "double": whole.double(),
        "wants": torch.ones(3).requires_grad_(),
        "sparse": torch.eye(3).to_sparse(),
        "text": "text",
        "twice": [whole, whole],
    }


def same(found, wanted):
    if not isinstance(wanted, torch.Tensor):
        return found == wanted
    if wanted.is_sparse:
        return found is wanted
    return (
        torch.equal(found.cpu(), wanted)
        and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        and found.requires_grad == wanted.requires_grad
    )


def check_odd_things(found, wanted):
    assert list(found) == list(wanted)
    for key in wanted.keys() - {"twice"}:
        assert same(found[key], wanted[key]), key
    assert found["twice"][0] is found["twice"][1]
    assert found["twice"][0] is found["plain"]
    for key in ("plain", "channels last", "turned"):
        assert found[key].stride() == wanted[key].stride(), key


def test_tensors_of_many_kinds_pass_through_staging(fake_gpu):
    wanted = [odd_things(number) for number in range(6)]
    found = list(fake_feed(wanted))
    for one, other in zip(found, wanted, strict=True):
        check_odd_things(one, other)
        assert one["plain"] is not other["plain"]
    assert len(fake_gpu) == 2


def test_staging_memory_is_used_again_and_grows_only_when_it_must(fake_gpu):
    feed = fake_feed([torch.full((size,), float(size)) for size in (10, 1000, 900, 20, 1000, 5, 3000, 1000, 3000, 10)])
    for _ in range(2):
        assert all(bool((x == len(x)).all()) for x in feed)
    assert [len(memory) for memory in fake_gpu] == [64, 4096, 4096, 16384]  # two slots, in turn
    assert feed._carrier.staging.num_bytes == 4096 + 16384
    feed.close()
    assert feed._carrier.staging.num_bytes == 0


def test_a_loader_may_write_to_the_same_tensor_again(fake_gpu):
    """Its numbers are in pinned memory before it is asked for more."""

    def loader():
        own = torch.zeros(100)
        for number in range(10):
            yield own.fill_(number)

    assert [float(x[0]) for x in fake_feed(loader(), ahead=4)] == list(range(10))


def test_the_user_s_stream_waits_for_the_copies(fake_gpu):
    feed = fake_feed([torch.ones(3)] * 4)
    user = torch.cuda.current_stream(CPU)
    for count, _ in enumerate(feed, start=1):
        assert len(user.waits_for) == count


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_host_that_runs_ahead_of_the_gpu_does_not_fill_its_memory(fake_gpu, monkeypatch, ahead):
    """What a step uses counts until the GPU is done with it, not until the host has queued it."""
    held = []
    monkeypatch.setattr(FakeEvent, "held", held)
    feed = fake_feed([torch.full((3,), float(n)) for n in range(12)], ahead=ahead)
    sent, send = [], feed._carrier.send
    monkeypatch.setattr(feed._carrier, "send", lambda *given: sent.append(1) or send(*given))
    found = []
    user = threading.Thread(target=lambda: found.extend(float(x[0]) for x in feed))
    user.start()
    for done in range(12):
        there = min(12, done + ahead + 1)
        wait_until(lambda: len(sent) == there and len(found) == there)  # noqa: B023 - called at once
        time.sleep(0.01)
        assert len(sent) == there
        wait_until(lambda: len(held) > done)  # noqa: B023 - called at once
        held[done].over.set()
    user.join(20)
    assert found == list(range(12))


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
def test_no_thread_is_left_behind_beside_a_gpu(fake_gpu, stop):
    stop(fake_feed(Counting(50)))
    gc.collect()
    assert not workers()


# ---- on a GPU

SLEEP = 20_000_000  # cycles of a GPU: some 10 ms


def cuda(test):
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


class Rewriting:
    """A loader that writes each batch to the same memory."""

    def __init__(self, count, is_pinned):
        self.count, self.is_pinned = count, is_pinned

    def __iter__(self):
        own = torch.empty(1 << 20, pin_memory=self.is_pinned)
        for number in range(self.count):
            yield own.fill_(number)


def ends_of(x):
    """Return the least and the greatest number, on the GPU."""
    return torch.stack([x.min(), x.max()])


@cuda
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("is_pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("is_beside", [False, True], ids=["default stream", "own stream"])
def test_nothing_is_written_over_before_a_slow_gpu_has_read_it(ahead, is_pinned, is_beside):
    """The host is far ahead, has let go of the batch, and the loader writes the next one to its own memory."""
    found = []
    stream = torch.cuda.Stream() if is_beside else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for x in penstock.feed(Rewriting(30, is_pinned), device="cuda", ahead=ahead):
            assert x.is_cuda
            torch.cuda._sleep(SLEEP)
            found.append(ends_of(x))
            del x
    torch.cuda.synchronize()
    assert [ends.tolist() for ends in found] == [[number, number] for number in range(30)]


@cuda
def test_batches_that_the_user_keeps_stay_as_they_are():
    found = list(penstock.feed(Rewriting(20, False), device="cuda"))
    assert [ends_of(x).tolist() for x in found] == [[number, number] for number in range(20)]


@cuda
def test_what_a_loader_makes_on_a_gpu_passes_when_it_is_made():
    made = []

    def loader():
        for number in range(10):
            torch.cuda._sleep(SLEEP)
            made.append(torch.full((1 << 20,), float(number), device="cuda"))
            yield {"x": made[-1]}

    found, passed = [], []
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in penstock.feed(loader(), device="cuda"):
            passed.append(batch["x"])
            found.append(ends_of(batch["x"]))
    torch.cuda.synchronize()
    assert [ends.tolist() for ends in found] == [[number, number] for number in range(10)]
    assert all(one is other for one, other in zip(passed, made, strict=True))


@cuda
@pytest.mark.parametrize("is_pinned", [False, True], ids=["pageable", "pinned"])
def test_tensors_of_many_kinds_go_to_a_gpu(is_pinned):
    wanted = [odd_things(number) for number in range(6)]
    if is_pinned:
        for item in wanted:
            whole = item["plain"].pin_memory()
            item |= {"plain": whole, "twice": [whole, whole], "with gaps": whole[:, ::2, 1:]}
            item["half"] = item["half"].pin_memory()
    for found, item in zip(penstock.feed(wanted, device="cuda"), wanted, strict=True):
        assert all(t.is_cuda for key, t in found.items() if isinstance(t, torch.Tensor) and key != "sparse")
        check_odd_things(found, item)


@cuda
def test_pinned_memory_is_used_again(monkeypatch):
    made, pinned = [], staging.pinned
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: made.append(num_bytes) or pinned(num_bytes))
    feed = penstock.feed([(torch.randn(1000, 100), torch.arange(1000)) for _ in range(20)], device="cuda")
    for _ in range(3):
        assert sum(1 for _ in feed) == 20
    assert made == [1 << 19] * 2
    assert feed._carrier.staging.num_bytes == 1 << 20
    feed.close()
    assert feed._carrier.staging.num_bytes == 0


@cuda
@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_thread_synchronises_the_gpu(thread):
    """The mode is that of the whole process: it would stop a copy of the worker's that is not asynchronous, too."""
    weight, total = torch.randn(512, 512, device="cuda"), torch.zeros((), device="cuda")
    batches = iter(penstock.feed([torch.randn(512, 512) for _ in range(30)], device="cuda", thread=thread))
    total += (next(batches) @ weight).sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in batches:
            total += (x @ weight).sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(total)


@cuda
def test_the_user_gets_batches_while_the_gpu_is_busy():
    batches = iter(penstock.feed([torch.full((8,), float(n)) for n in range(4)], device="cuda", ahead=2, thread=True))
    found = [next(batches)]
    wait_until(lambda: len(batches._channel._parcels) == 2)
    torch.cuda._sleep(200 * SLEEP)
    busy = torch.cuda.Event()
    busy.record()
    found += [next(batches), next(batches)]
    assert not busy.query()
    assert [float(x[0]) for x in [*found, *batches]] == [0, 1, 2, 3]


@cuda
@pytest.mark.parametrize("thread", [True, False])
def test_a_host_that_runs_ahead_does_not_fill_the_gpu(thread):
    batch = torch.randn(1 << 22)
    num_bytes = batch.numel() * batch.element_size()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    total = torch.zeros((), device="cuda")
    for x in penstock.feed([batch] * 40, device="cuda", ahead=2, thread=thread):
        torch.cuda._sleep(SLEEP)
        total += x.sum()
    torch.cuda.synchronize()
    # three that were sent, and one or two that the user let go of a moment ago
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before <= 6 * num_bytes


@cuda
@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("graphs", [False, True])
def test_training_on_a_gpu_has_the_losses_that_it_would_have(graphs, thread):
    pairs = [tuple(data(12, seed=seed)) for seed in range(12)]

    def run(batches_of):
        model = sequence(4).cuda()
        with penstock.Pipeline(
            model, example=pairs[0][0].cuda(), loss=nn.functional.mse_loss, cuts=[4], micro_batches=4,
            devices=["cuda:0"] * 2, timeout=60, graphs=graphs,
        ) as pipe:  # fmt: skip
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            losses = []
            for batch, target in batches_of(pipe):
                losses.append(pipe.step(batch, target))
                optimizer.step()
                optimizer.zero_grad()
            return torch.stack(losses)

    found = run(lambda pipe: penstock.feed(pairs, pipe, thread=thread))
    wanted = run(lambda pipe: [(x.cuda(), y.cuda()) for x, y in pairs])
    assert torch.allclose(found, wanted, rtol=1e-10, atol=0)


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus_inputs_go_to_the_first_lane_and_targets_to_the_last():
    pairs = [tuple(data(8, seed=seed)) for seed in range(6)]
    model = sequence(4)
    plain = copy.deepcopy(model)
    with penstock.Pipeline(
        model, example=pairs[0][0], loss=nn.functional.mse_loss, cuts=[4], micro_batches=4,
        devices=["cuda:0", "cuda:1"], timeout=60,
    ) as pipe:  # fmt: skip
        for (batch, target), (x, y) in zip(penstock.feed(pairs, pipe), pairs, strict=True):
            assert (batch.device, target.device) == tuple(GPUS)
            loss = pipe.step(batch, target)
            assert torch.allclose(loss.cpu(), nn.functional.mse_loss(plain(x), y), rtol=1e-10)
