"""feed without a thread, or until one is needed: the same batches in the same order, pulled within the loop."""

import contextlib
import itertools
import json
import queue
import sqlite3
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from feeding.test_feed import (  # noqa: F401 - a fixture
    Counting,
    FakeEvent,
    Thing,
    fake_feed,
    fake_gpu,
    numbers,
    wait_until,
    workers,
)
from penstock.errors import UsageError
from penstock.feeding import item_source
from pipelines import data, sequence


def inline(loader, **given):
    return penstock.feed(loader, thread=False, **({"device": "cpu"} | given))


def test_batches_come_in_order_from_the_user_s_thread():
    seen = []

    def loader():
        for number in range(20):
            seen.append(threading.current_thread())
            yield number

    assert list(inline(loader())) == list(range(20))
    assert set(seen) == {threading.current_thread()}


def test_nothing_is_pulled_that_was_not_asked_for():
    loader = Counting(30)
    for given, _ in enumerate(inline(loader, ahead=5), 1):
        assert loader.pulled == given


def test_a_batch_that_was_used_is_not_held():
    most = 0
    for number, _ in enumerate(inline(iter(Thing, None), ahead=3)):
        most = max(most, Thing.alive)
        if number == 20:
            break
    assert most <= 2  # the user's, and the next, which is made before the user lets go of it
    del _
    assert Thing.alive == 0


def test_an_error_comes_where_its_batch_would_have_come():
    loader = Counting(10, fails_at=4)
    batches, found = iter(inline(loader)), []
    with pytest.raises(KeyError, match="the loader's own"):
        found.extend(number for _, number in batches)
    assert found == [0, 1, 2, 3]
    assert list(batches) == []

    def stopping(item):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(inline(Counting(), split=stopping))


def test_ctrl_c_in_the_loader_is_the_user_s_at_once():
    def loader():
        yield 0
        raise KeyboardInterrupt

    batches = iter(inline(loader()))
    assert next(batches) == 0
    with pytest.raises(KeyboardInterrupt):
        next(batches)


def test_a_loop_that_is_left_leaves_the_loader():
    is_closed = []

    def loader():
        try:
            yield from range(10)
        finally:
            is_closed.append(True)

    for number in inline(loader()):
        if number == 3:
            break
    assert is_closed == [True]


def test_epochs_and_states():
    feed = inline(Counting(6))
    assert [numbers(feed), numbers(feed), feed.epoch] == [list(range(6)), list(range(6)), 2]
    under_way = iter(feed)
    assert [number for _, number in itertools.islice(under_way, 3)] == [0, 1, 2]
    state = json.loads(json.dumps(feed.state_dict()))
    again = inline(Counting(6))
    again.load_state_dict(state)
    assert (numbers(again), again.epoch) == ([3, 4, 5], 3)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("at", [1, 4, 7, 10])
def test_a_shuffled_order_goes_on(num_workers, at):
    def shuffled():
        drawn = torch.Generator().manual_seed(7)
        return inline(
            DataLoader(torch.arange(24), batch_size=4, shuffle=True, num_workers=num_workers, generator=drawn)
        )

    def take(feed, count):
        found = []
        while len(found) < count:
            for batch in feed:
                found.append(batch.tolist())
                if len(found) == count:
                    break
        return found

    whole = take(shuffled(), 12)
    first = shuffled()
    found = take(first, at)
    state = first.state_dict()
    second = shuffled()
    second.load_state_dict(state)
    assert found + take(second, 12 - at) == whole


def test_training_has_the_losses_that_it_would_have():
    def losses(batches_of):
        torch.manual_seed(0)
        model = sequence(4)
        loader = DataLoader(
            TensorDataset(*data(24)), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        with penstock.Pipeline(
            model, example=data(8)[0], loss=nn.functional.mse_loss, lanes=2, micro_batches=4, cuts=[4]
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            found = []
            for batch, target in batches_of(loader, pipe):
                found.append(float(pipe.step(batch, target)))
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert losses(lambda loader, pipe: penstock.feed(loader, pipe, thread=False)) == losses(lambda loader, _: loader)


# ---- on a stand-in for a GPU


class Queried:
    """An event: over at once, but for those of the user's stream, which are over when the test says so."""

    num_over, made, waited = 0, [], 0

    def __init__(self, blocking=False):
        assert blocking
        self.number = None

    def record(self, stream):
        if stream.name == "user":
            self.number = len(Queried.made)
            Queried.made.append(self)

    def query(self):
        return self.number is None or self.number < Queried.num_over

    def synchronize(self):
        Queried.waited += not self.query()
        if self.number is not None:
            Queried.num_over = max(Queried.num_over, self.number + 1)


@pytest.fixture
def queried(fake_gpu, monkeypatch):  # noqa: F811 - the fixture
    monkeypatch.setattr(torch.cuda, "Event", Queried)
    monkeypatch.setattr(Queried, "num_over", 0)
    monkeypatch.setattr(Queried, "made", [])
    monkeypatch.setattr(Queried, "waited", 0)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_host_that_runs_ahead_waits_only_when_nothing_is_left(queried, ahead):
    """The GPU is done with nothing by itself: so many batches are sent, and then one for each that is waited for."""
    feed = fake_feed([torch.full((3,), float(n)) for n in range(12)], ahead=ahead, thread=False)
    under_way, found = iter(feed), []
    for _ in range(ahead + 1):
        found.append(float(next(under_way)[0]))
        assert Queried.waited == 0
    assert under_way._channel._num_put <= ahead + 1
    for count in range(ahead + 1, 12):
        found.append(float(next(under_way)[0]))
        assert Queried.waited == count - ahead
        assert under_way._channel._num_put == count + 1
    assert found == list(range(12))
    assert next(under_way, None) is None


def test_a_gpu_that_keeps_up_is_never_waited_for(queried):
    feed, found = fake_feed([torch.full((3,), float(n)) for n in range(12)], thread=False), []
    for batch in feed:
        found.append(float(batch[0]))
        Queried.num_over = len(Queried.made)
    assert found == list(range(12))
    assert Queried.waited == 0


# ---- until a thread is needed


def auto(loader, **given):
    return penstock.feed(loader, thread="auto", **({"device": "cpu"} | given))


class Slow:
    """Takes its time for some of its batches, and notes which thread asks for each."""

    def __init__(self, length=10, slow=range(100), fails_at=None):
        self.length, self.slow, self.fails_at, self.asked = length, slow, fails_at, []

    def __len__(self):
        return self.length

    def __iter__(self):
        return map(self.item, range(self.length))

    def item(self, at):
        self.asked.append(threading.current_thread().name)
        if at == self.fails_at:
            raise KeyError("the loader's own")
        if at in self.slow:
            time.sleep(0.01)
        return torch.full((2,), float(at)), at


def is_beside(loader):
    return [name == "penstock-feed" for name in loader.asked]


@pytest.fixture(autouse=True)
def quick_is_quick(monkeypatch):
    """However busy the machine is, a loader that does nothing is not slow."""
    monkeypatch.setattr(item_source, "_SLOW_SECONDS", 0.009)


def test_a_loader_that_answers_at_once_gets_no_thread():
    loader = Slow(slow=())
    assert numbers(auto(loader)) == list(range(10))
    assert not any(is_beside(loader))


def test_a_loader_that_is_slow_three_times_in_a_row_gets_one_from_then_on():
    loader = Slow(slow={0, 1, 3, 4, 5})
    feed = auto(loader)
    assert numbers(feed) == list(range(10))
    assert is_beside(loader) == [False] * 6 + [True] * 4
    loader.asked.clear()
    assert numbers(feed) == list(range(10))
    assert all(is_beside(loader))
    assert feed.epoch == 2


def test_a_loader_that_waits_for_what_the_loop_does_gets_it():
    """As a buffer of what the loop itself makes: nothing may be pulled ahead before there is a thread to wait."""
    made, found = queue.Queue(), []
    made.put(0)

    def loader():
        while (item := made.get(timeout=20)) is not None:
            yield item

    for item in auto(loader()):
        found.append(item)
        made.put(item + 1 if item < 20 else None)
    assert found == list(range(21))


@pytest.mark.parametrize("stop", ["break", "error", "the loader's"])
def test_whatever_ends_the_loop_ends_the_thread_that_went_on(stop):
    loader = Slow(fails_at=6 if stop == "the loader's" else None)
    feed, found = auto(loader), []
    with contextlib.suppress(KeyError):
        for _, number in feed:
            found.append(number)
            if number == 5 and stop == "break":
                break
            if number == 5 and stop == "error":
                raise KeyError
    assert found == list(range(6))
    wait_until(lambda: not workers())


def test_a_state_is_where_the_user_is_whoever_pulls():
    feed = auto(Slow(12))
    under_way = iter(feed)
    assert [number for _, number in itertools.islice(under_way, 7)] == list(range(7))
    state = json.loads(json.dumps(feed.state_dict()))
    again = auto(Counting(12))
    again.load_state_dict(state)
    assert numbers(again) == list(range(7, 12))
    assert [number for _, number in under_way] == list(range(7, 12))


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_thread_that_goes_on_waits_for_the_gpu_where_it_is(fake_gpu, monkeypatch, ahead):  # noqa: F811
    """Not one batch more is sent than the GPU may be behind, by whoever sends it."""
    monkeypatch.setattr(FakeEvent, "held", [])
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: self.over.wait(20))  # in the user's thread too, at first

    class Loader(Slow):
        def item(self, at):
            return super().item(at)[0]

    feed = fake_feed(Loader(12), ahead=ahead, thread="auto")
    under_way = iter(feed)
    found = [float(next(under_way)[0]) for _ in range(ahead + 1)]
    for _ in range(ahead + 1, 12):
        assert under_way._channel._num_put <= len(found) + 1
        wait_until(lambda: FakeEvent.held)
        FakeEvent.held.pop(0).over.set()
        found.append(float(next(under_way)[0]))
    while FakeEvent.held:
        FakeEvent.held.pop(0).over.set()
    assert found == list(range(12))


def test_what_thread_may_be():
    made = [penstock.feed([1], device="cpu", thread=given) for given in (1, 0, "auto")]
    assert [feed._wants_thread for feed in made] == [True, False, "auto"]
    with pytest.raises(UsageError, match="thread: must be True, False or 'auto'; given: 'maybe'"):
        penstock.feed([1], device="cpu", thread="maybe")


def test_a_generator_stays_in_the_thread_that_it_began_in():
    """What it holds may belong to that thread, as a connection to a database does."""

    def rows():
        connection = sqlite3.connect(":memory:")
        for number in range(8):
            time.sleep(0.01)
            yield connection.execute("select ?", (number,)).fetchone()[0]

    class Rows:
        def __iter__(self):
            return rows()

    assert list(auto(rows())) == list(range(8))
    feed = auto(Rows())  # nobody can tell before it is asked
    assert list(feed) == list(feed) == list(range(8))
    assert feed._wants_thread is True


def test_a_generator_leaves_the_user_s_thread_as_it_is():
    def loader():
        with torch.no_grad():
            for number in range(6):
                time.sleep(0.01)
                yield number

    assert [torch.is_grad_enabled() for _ in auto(loader())] == [True] * 6
    assert torch.is_grad_enabled()


def test_closed_while_a_thread_is_taking_over(monkeypatch):
    """No thread goes on pulling behind the user's back."""
    loader, real = Slow(1000), item_source.InlineSource.hand_over

    def hand_over(self):
        found = real(self)
        feed.close()
        return found

    monkeypatch.setattr(item_source.InlineSource, "hand_over", hand_over)
    feed = auto(loader)
    assert len(list(feed)) <= 3
    wait_until(lambda: not workers())


def test_ctrl_c_in_a_pull_does_not_end_the_epoch():
    class Loader(Slow):
        def item(self, at):
            if at == 2 and not self.asked.count("stop"):
                self.asked.append("stop")
                raise KeyboardInterrupt
            return super().item(at)

    feed = auto(Loader(6, slow=()))
    under_way = iter(feed)
    next(under_way), next(under_way)
    with pytest.raises(KeyboardInterrupt):
        next(under_way)
    assert list(under_way) == []
    state = feed.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 2)
    again = auto(Counting(6))
    again.load_state_dict(state)
    assert numbers(again) == [2, 3, 4, 5]


def test_a_new_epoch_waits_for_whoever_is_in_the_loader():
    inside, most, go_on = [], [], threading.Event()

    class Loader(Slow):
        def item(self, at):
            inside.append(at)
            most.append(len(inside))
            if at == 1:
                go_on.wait(20)
            inside.remove(at)
            return super().item(at)

    feed = auto(Loader(4, slow=()))
    found = []
    user = threading.Thread(target=lambda: found.extend(number for _, number in feed))
    user.start()
    wait_until(lambda: inside == [1])
    threading.Timer(0.1, go_on.set).start()
    assert numbers(feed) == [0, 1, 2, 3]
    user.join(20)
    assert max(most) == 1
