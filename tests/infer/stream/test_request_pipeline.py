"""A pipeline of requests: results in order, no more in flight than may be, errors where they belong, no thread left."""

import gc
import random
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError, wait

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import UsageError
from penstock.infer import Graph, RequestPipeline

SECONDS = 20  # what nothing here takes; a test that would hang fails


def threads_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-infer")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    assert not threads_left()
    yield
    assert not threads_left()


class Gate:
    """A function that stops until it is opened, and tells when someone has come."""

    def __init__(self):
        self.opened, self.reached, self.count = threading.Event(), threading.Event(), 0

    def __call__(self, thing):
        self.count += 1
        self.reached.set()
        assert self.opened.wait(SECONDS)
        return thing


def double(x):
    return x * 2


def layers(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, width)).double()


def tensors(count, width=4, rows=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(count)]


# ---- what comes out


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_results_come_in_order(workers, depth):
    chance = random.Random(0)

    def jitter(thing):
        time.sleep(chance.random() / 500)
        return thing

    with RequestPipeline(double, preprocess=jitter, postprocess=jitter, workers=workers, depth=depth) as pipe:
        assert list(pipe.map(range(40))) == [2 * n for n in range(40)]
        assert list(pipe.map([])) == []
        assert list(pipe.map(range(3))) == [0, 2, 4]


@pytest.mark.parametrize("kind", ["module", "with an example", "graph", "function"])
def test_any_model(kind):
    model, given = layers(), tensors(6)
    wanted = [tensor.detach() for tensor in map(layers().eval(), given)]
    made = {
        "module": lambda: RequestPipeline(model),
        "with an example": lambda: RequestPipeline(model, example=given[0]),
        "graph": lambda: RequestPipeline(Graph(model, given[0])),
        "function": lambda: RequestPipeline(model.eval().forward),
    }[kind]
    with made() as pipe:
        found = list(pipe.map(given))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad
    assert model.training == (kind != "function")


def test_arguments_are_a_tuple_a_dict_or_one_thing():
    def told(*args, **kwargs):
        return args, kwargs

    with RequestPipeline(told) as pipe:
        requests = [(1, 2), {"a": 1}, [3, 4], "text", None, torch.zeros(1)]
        found = list(pipe.map(requests))
    assert found[:5] == [((1, 2), {}), ((), {"a": 1}), (([3, 4],), {}), (("text",), {}), ((None,), {})]
    assert found[5][0][0] is requests[5]


def test_preprocess_and_postprocess():
    with RequestPipeline(
        layers(), preprocess=lambda text: torch.full((2, 4), float(text), dtype=torch.float64),
        postprocess=lambda out: out.sum().item(),
    ) as pipe:  # fmt: skip
        found = list(pipe.map(["1", "2.5"]))
    model = layers().eval()
    assert found == [model(torch.full((2, 4), n, dtype=torch.float64)).sum().item() for n in (1.0, 2.5)]


@pytest.mark.parametrize("with_example", [False, True])
def test_stages(with_example):
    """Each is called with what the one before returned; a tuple is several arguments."""

    class Splits(nn.Module):
        def forward(self, x):
            return x + 1, {"more": x * 2}

    class Joins(nn.Module):
        def forward(self, x, rest):
            return x * rest["more"]

    given = tensors(8)
    options = {"example": given[0]} if with_example else {}
    with RequestPipeline(stages=[Splits(), Joins(), double], **options) as pipe:
        found = list(pipe.map(given))
        assert sum("stage" in name for name in threads_left()) == 3
    for a, x in zip(found, given, strict=True):
        assert torch.equal(a, (x + 1) * (x * 2) * 2)


def test_all_parts_work_at_the_same_time():
    """One request is finished, one computed in each stage and one prepared, each of which waits for all others."""
    together = threading.Barrier(4, timeout=SECONDS)

    def meet(thing):
        if thing >= 3:  # by then there is a request in every part
            together.wait()
        return thing

    def part(place):
        # the first three requests fill the pipeline: part n meets the others from its request 3 - n on
        return lambda thing: meet(thing + place) - place

    with RequestPipeline(stages=[part(1), part(2)], preprocess=part(0), postprocess=part(3), depth=4) as pipe:
        futures = [pipe.submit(n) for n in range(4)]
        # requests 0 to 3 are in postprocess, stage 1, stage 0 and preprocess: all four meet at once
        assert futures[0].result(SECONDS) == 0
        together.abort()
        wait(futures, SECONDS)


# ---- how many are in flight


@pytest.mark.parametrize("depth", [1, 3])
def test_requests_are_not_read_ahead_of_what_is_asked_for(depth):
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield read

    with RequestPipeline(double, depth=depth) as pipe:
        results = pipe.map(endless())
        assert read == 0
        for taken in range(20):
            assert next(results) == 2 * (taken + 1)
            assert read <= taken + depth
        del results


def test_submit_waits_while_enough_are_in_flight():
    gate, third = Gate(), []
    with RequestPipeline(gate, depth=2) as pipe:
        futures = [pipe.submit(n) for n in range(2)]
        thread = threading.Thread(target=lambda: third.append(pipe.submit(2)))
        thread.start()
        assert gate.reached.wait(SECONDS)
        assert not third
        assert not any(future.done() for future in futures)
        gate.opened.set()
        thread.join(SECONDS)
        assert [future.result(SECONDS) for future in (*futures, *third)] == [0, 1, 2]


def test_a_result_that_nobody_has_fetched_takes_no_place():
    with RequestPipeline(double, depth=2) as pipe:
        futures = [pipe.submit(n) for n in range(50)]
        assert [future.result(SECONDS) for future in futures] == [2 * n for n in range(50)]


# ---- errors


class OddError(Exception):
    pass


def fail_if_odd(n):
    if n % 2:
        raise OddError(n)
    return n


@pytest.mark.parametrize("place", ["preprocess", "the model", "postprocess"])
def test_an_error_belongs_to_its_request(place):
    options = {} if place == "the model" else {place: fail_if_odd}
    with RequestPipeline(fail_if_odd if place == "the model" else double, **options) as pipe:
        found = list(pipe.map(range(6), errors="return"))
        raised = pipe.submit(7).exception(SECONDS) if place != "postprocess" else None
        assert pipe.submit(8).result(SECONDS) is not None
    if place == "postprocess":
        assert found == [0, 2, 4, 6, 8, 10]  # doubled: none is odd
        return
    assert [type(one) for one in found] == [int, OddError] * 3
    assert raised.args == (7,)
    assert raised.__notes__ == [f"in {place}, for request 6 of an inference pipeline"]


def test_an_error_after_the_model():
    with RequestPipeline(lambda n: n, postprocess=fail_if_odd) as pipe:
        found = list(pipe.map(range(4), errors="return"))
    assert [type(one) for one in found] == [int, OddError, int, OddError]
    assert "in postprocess, for request 1" in found[1].__notes__[0]


def test_an_error_is_raised_in_its_turn_and_the_next_result_follows():
    with RequestPipeline(fail_if_odd) as pipe:
        results, found = pipe.map(range(5)), []
        while True:
            try:
                found.append(next(results))
            except OddError as error:
                found.append(error.args)
            except StopIteration:
                break
        assert found == [0, (1,), 2, (3,), 4]
        assert next(results, "end") == "end"


def test_an_error_in_a_later_stage_says_which():
    with RequestPipeline(stages=[double, lambda n: n // 2, fail_if_odd]) as pipe:
        error = pipe.submit(3).exception(SECONDS)
    assert "in stage 2, for request 0" in error.__notes__[0]


def test_requests_that_cannot_be_read_end_after_those_that_could():
    def broken():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    with RequestPipeline(double) as pipe:
        results = pipe.map(broken())
        assert [next(results), next(results)] == [2, 4]
        with pytest.raises(OSError, match="the disk is gone"):
            next(results)
        assert next(results, "end") == "end"
        assert list(pipe.map([5])) == [10]


# ---- the end


def test_closing_finishes_what_has_begun_and_cancels_the_rest():
    gate = Gate()
    pipe = RequestPipeline(double, preprocess=gate, depth=4)
    futures = [pipe.submit(n) for n in range(4)]
    assert gate.reached.wait(SECONDS)
    closing = threading.Thread(target=pipe.close)
    closing.start()
    for future in futures[1:]:
        with pytest.raises(CancelledError):
            future.result(SECONDS)
    gate.opened.set()
    closing.join(SECONDS)
    assert futures[0].result(SECONDS) == 0
    assert gate.count == 1
    assert not threads_left()
    pipe.close()
    with pytest.raises(UsageError, match="the pipeline is closed"):
        pipe.submit(1)


def test_closing_wakes_those_who_wait_for_a_place():
    gate, told = Gate(), []
    pipe = RequestPipeline(gate, depth=1)
    first = pipe.submit(0)
    assert gate.reached.wait(SECONDS)

    def try_it():
        try:
            pipe.submit(1)
        except UsageError as error:
            told.append(str(error))

    waiting = [threading.Thread(target=try_it) for _ in range(3)]
    closing = threading.Thread(target=pipe.close)
    for thread in (*waiting, closing):
        thread.start()
    for thread in waiting:
        thread.join(SECONDS)
    assert told == ["the pipeline is closed; make another one"] * 3
    gate.opened.set()
    closing.join(SECONDS)
    assert first.result(SECONDS) == 0


def test_results_of_a_closed_pipeline():
    """What was begun is handed out, then it is said that the pipeline is closed."""
    finished = threading.Event()

    def note(n):
        if n == 1:
            finished.set()
        return n

    pipe = RequestPipeline(double, preprocess=note, depth=2)
    results = pipe.map(range(10))
    assert next(results) == 0
    assert finished.wait(SECONDS)
    pipe.close()
    assert next(results) == 2
    with pytest.raises(UsageError, match="the pipeline is closed"):
        next(results)
    with pytest.raises(UsageError, match="the pipeline is closed"):
        next(pipe.map([1]))


def test_a_future_can_be_cancelled_before_it_begins():
    gate = Gate()
    with RequestPipeline(double, preprocess=gate, depth=3) as pipe:
        first, second, third = (pipe.submit(n) for n in range(3))
        assert gate.reached.wait(SECONDS)
        assert second.cancel()
        assert not first.cancel()
        gate.opened.set()
        assert (first.result(SECONDS), third.result(SECONDS)) == (0, 4)
        assert [pipe.submit(n).result(SECONDS) for n in range(6)] == [0, 2, 4, 6, 8, 10]  # its place is free again
    assert gate.count == 8


def test_results_that_are_dropped_are_cancelled():
    gate, begun = Gate(), []

    def prepare(n):
        begun.append(n)
        return gate(n) if n == 1 else n

    with RequestPipeline(double, preprocess=prepare, depth=4) as pipe:
        results = pipe.map(range(100))
        assert next(results) == 0
        assert gate.reached.wait(SECONDS)  # 1 has begun; 2 and 3 have been read
        del results
        gc.collect()
        gate.opened.set()
        assert pipe.submit(50).result(SECONDS) == 100
    assert begun == [0, 1, 50]


def test_an_error_around_it_closes_it_too():
    def work():
        with RequestPipeline(double) as pipe:
            pipe.submit(1)
            raise OddError

    with pytest.raises(OddError):
        work()
    assert not threads_left()


def test_a_pipeline_that_is_dropped_ends_its_threads():
    pipe = RequestPipeline(double)
    assert pipe.submit(1).result(SECONDS) == 2
    assert sorted(threads_left()) == [
        "penstock-infer-postprocess-0",
        "penstock-infer-preprocess-0",
        "penstock-infer-stage-0-0",
    ]
    del pipe
    gc.collect()


def test_a_request_whose_pipeline_nobody_holds_is_finished():
    assert RequestPipeline(double).submit(1).result(SECONDS) == 2
    gc.collect()


def test_a_request_that_hangs_does_not_keep_the_process(tmp_path):
    """The story: the threads are daemons, and the end of the process waited for them all the same."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import threading\n"
        "from penstock.infer import RequestPipeline; from penstock.infer.stream import stream_threads\n"
        "stream_threads._EXIT_SECONDS = 0.1\n"
        "begun = threading.Event()\n"
        "def hang(request):\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "pipe = RequestPipeline(print, preprocess=hang)\n"
        "pipe.submit(1)\n"
        "assert begun.wait(60)\n"
    )
    assert subprocess.run([sys.executable, script], timeout=SECONDS + 60, check=False).returncode == 0


def test_a_request_that_raises_stop_iteration_does_not_end_the_others():
    def first_of(request):
        return next(iter([])) if request == 2 else request

    with RequestPipeline(double, preprocess=first_of) as pipe:
        results = pipe.map(range(5))
        assert [next(results), next(results)] == [0, 2]
        with pytest.raises(RuntimeError, match="a request raised StopIteration"):
            next(results)
        assert list(results) == [6, 8]


def test_stages_that_share_a_layer_keep_its_mode():
    shared = nn.Dropout(0.5)
    stages = [nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(shared, nn.Linear(4, 4)), shared]
    with RequestPipeline(stages=stages, depth=8) as pipe:
        found = list(pipe.map([torch.ones(64, 4)] * 100))
    assert all(torch.equal(result, found[0]) for result in found)
    assert shared.training


def test_a_pipeline_is_not_closed_from_within():
    pipe = RequestPipeline(double, postprocess=lambda _: pipe.close())
    error = pipe.submit(1).exception(SECONDS)
    assert isinstance(error, UsageError)
    assert "close: called in a thread of the pipeline itself" in str(error)
    pipe.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "either a model or stages"),
        ({"stages": [double]}, "either a model or stages"),
        ({"model": None, "stages": []}, "stages: the list is empty"),
        ({"model": 3}, "model: 3 cannot be called"),
        ({"depth": 0, "workers": 1.5}, "depth: 0 must be a whole number of at least 1; workers: 1.5"),
        ({"device": "cuda:99"}, "cannot be used"),
        ({"model": None, "stages": double}, "stages: expected a list of stages; given: function"),
        ({"model": None, "stages": nn.Linear(2, 2)}, "stages: expected a list of stages; given: Linear"),
        ({"model": None, "stages": [double, 3]}, "stage 1: 3 cannot be called"),
    ],
)
def test_wrong_arguments(options, message):
    arguments = {"model": double} | options
    with pytest.raises(UsageError, match=message):
        RequestPipeline(arguments.pop("model"), **arguments)


def test_requests_can_be_gone_through():
    class Dataset:  # as torch's own, without __iter__
        def __getitem__(self, index):
            if index == 3:
                raise IndexError
            return index

    with RequestPipeline(double) as pipe:
        assert list(pipe.map(Dataset())) == [0, 2, 4]
        with pytest.raises(UsageError, match="requests: expected an iterable"):
            pipe.map(3)


def test_errors_is_one_of_two():
    with RequestPipeline(double) as pipe, pytest.raises(UsageError, match="errors: 'ignore'"):
        pipe.map([], errors="ignore")


# ---- on a GPU


def same(found, wanted):
    return found.device.type == "cpu" and (found - wanted.cpu()).norm() <= 1e-11 * max(1.0, float(wanted.norm()))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    def wanted(self, model, given):
        with torch.no_grad():
            return [model(tensor.cuda()).cpu() for tensor in given]

    def test_requests_of_all_shapes(self):
        """Seats are used again, for other shapes too; what was handed out stays as it is."""
        model = layers(64).cuda().eval()
        given = [tensors(1, 64, rows=1 + n % 3)[0] * n for n in range(30)]
        with RequestPipeline(model, example=given[0], workers=2) as pipe:
            found = list(pipe.map(given))
        assert all(same(a, b) for a, b in zip(found, self.wanted(model, given), strict=True))

    def test_the_host_waits_for_nothing_but_results(self):
        model, given = layers(64).cuda().eval(), tensors(20, 64)
        wanted = self.wanted(model, given)
        with RequestPipeline(model, example=given[0]) as pipe:
            assert len(list(pipe.map(given[:2]))) == 2  # the graph is captured
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that it does not see everything
                torch.cuda.set_sync_debug_mode("error")
                try:
                    found = list(pipe.map(given))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))

    def test_requests_that_are_on_the_gpu_or_pinned(self):
        model, host = layers(64).cuda().eval(), tensors(12, 64)
        wanted = self.wanted(model, [tensor * 2 for tensor in host])

        def late(tensor):
            torch.cuda._sleep(1_000_000)
            return tensor.cuda() * 2

        with RequestPipeline(model, example=host[0], preprocess=lambda x: x) as pipe:
            found = list(pipe.map(late(tensor) for tensor in host))
            pinned = list(pipe.map((tensor * 2).pin_memory() for tensor in host))
        with RequestPipeline(model, example=host[0], preprocess=late, workers=2) as pipe:
            prepared = list(pipe.map(host))
        for result in (found, pinned, prepared):
            assert all(same(a, b) for a, b in zip(result, wanted, strict=True))

    @pytest.mark.parametrize("with_example", [False, True])
    def test_stages_that_share_the_gpu(self, with_example):
        first, second = layers(64).cuda().eval(), layers(64).cuda().eval()
        given = tensors(12, 64)
        with torch.no_grad():
            wanted = [second(first(tensor.cuda())) for tensor in given]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no CUDA graph: no example")
            pipe = RequestPipeline(stages=[first, second], **({"example": given[0]} if with_example else {}))
        with pipe:
            found = list(pipe.map(given))
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))

    def test_from_a_gpu_to_a_cpu_and_back(self):
        first, between, last = layers(64).cuda().eval(), layers(64).eval(), layers(64).cuda().eval()
        given = tensors(8, 64)
        with torch.no_grad():
            wanted = [last(between(first(tensor.cuda()).cpu()).cuda()) for tensor in given]
        with RequestPipeline(stages=[first, between, last], example=given[0]) as pipe:
            found = list(pipe.map(given))
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))

    def test_without_an_example_it_says_that_there_is_no_graph(self):
        with pytest.warns(UserWarning, match="example= is missing"):
            pipe = RequestPipeline(layers(64).cuda())
        with pipe:
            assert pipe.submit(tensors(1, 64)[0]).result(SECONDS).shape == (3, 64)

    def test_errors_leave_the_others_as_they_are(self):
        model, given = layers(64).cuda().eval(), tensors(12, 64)
        wrong = [torch.zeros(3, 63, dtype=torch.float64) if n % 3 == 1 else x for n, x in enumerate(given)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no CUDA graph for a call")
            with RequestPipeline(model, example=given[0]) as pipe:
                found = list(pipe.map(wrong, errors="return"))
        wanted = self.wanted(model, given)
        for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert isinstance(a, RuntimeError) if n % 3 == 1 else same(a, b)

    def test_outputs_of_any_structure(self):
        def told(x):
            return {"twice": x * 2, "rest": (x.sum(), "text", None)}

        given = tensors(3)
        with RequestPipeline(told, device="cuda") as pipe:
            found = list(pipe.map(given))
        for result, x in zip(found, given, strict=True):
            assert same(result["twice"], x * 2)
            assert same(result["rest"][0], x.sum())
            assert result["rest"][1:] == ("text", None)


def test_one_model_in_several_places_keeps_its_mode():
    """Each call puts it into evaluation for a while: not one of them may take another's for what it was before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    x = torch.ones(8, 4)
    graphs = [Graph(model, x) for _ in range(2)]
    wanted = graphs[0](x)
    wrong = []

    def call(graph):
        wrong.extend(1 for _ in range(300) if not torch.equal(graph(x), wanted))

    threads = [threading.Thread(target=call, args=(graph,)) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": nn.Linear}, "model: Linear is a class; pass an instance"),
        ({"model": nn.Linear(2, 2), "preprocess": 3}, "preprocess: expected a function; given: int"),
        ({"model": nn.Linear(2, 2), "postprocess": "a"}, "postprocess: expected a function; given: str"),
    ],
)
def test_what_cannot_be_right_is_refused_at_once(given, told):
    with pytest.raises(UsageError, match=told):
        RequestPipeline(**given)


def test_compile_is_yes_or_no():
    with pytest.raises(UsageError, match="compile: 'yes' is neither True nor False"):
        Graph(nn.Linear(2, 2), torch.ones(1, 2), compile="yes")


def test_the_old_name_still_works_with_a_warning():
    with pytest.warns(FutureWarning, match=r"is now penstock\.infer\.RequestPipeline"):
        assert penstock.infer.Pipeline is RequestPipeline
