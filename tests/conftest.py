"""What all tests share: which cases of a grid run by default, and that no test leaves anything behind."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from pathlib import Path

import pytest

_MARK = "PENSTOCK_TEST_SESSION"  # in the environment of every process that a test starts
_PATIENCE_SECONDS = 15.0  # for processes that are about to end
_WHOLE = 24  # a grid with no more cases than this runs whole
_BEFORE = pytest.StashKey[set]()
# helpers that start other programs; `--quick` leaves out the files that import them
_PROGRAMS = {"browser", "code_blocks", "faults.launched", "launched", "processes", "terminals", "training_runs"}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full grids, and the tests marked full")
    parser.addoption("--quick", action="store_true", help="run one case of each grid, and no test that starts programs")


# ---- which cases run


def pytest_collection_modifyitems(config, items):
    """Leave out what only `--full` runs: tests marked full, and most cases of large grids. `--quick` leaves out more.

    Of a grid with three axes or more, those cases run that show every pair of values of any two axes once. Of a grid
    with two axes, those that show every value once. Of a test marked `sample(n)`, n cases run, evenly spread.
    """
    if config.getoption("--full") or config.option.keyword or any("::" in arg for arg in config.args):
        return
    is_quick = config.option.quick
    left_out = {id(item) for item in items if item.get_closest_marker("full") or (is_quick and _takes_long(item))}
    grids = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and (is_quick or not item.get_closest_marker("whole")):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        chosen = range(len(cases))
        if is_quick:
            chosen = _spread(len(cases), 1)
        elif marker := cases[0].get_closest_marker("sample"):
            chosen = _spread(len(cases), *marker.args)
        elif len(cases) > _WHOLE:
            chosen = _sample([_values(case) for case in cases])
        left_out |= {id(case) for at, case in enumerate(cases) if at not in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def _takes_long(item):
    """Return whether `--quick` leaves a test out: it is marked slow, or its file imports a helper for programs."""
    imported = vars(item.module).values() if isinstance(item, pytest.Function) else ()
    homes = {getattr(thing, "__module__", None) or getattr(thing, "__name__", None) for thing in imported}
    return item.get_closest_marker("slow") is not None or not homes.isdisjoint(_PROGRAMS)


def _values(case):
    """Return the value of each axis of a case, by identity; each `parametrize` or fixture parameter is an axis."""
    params = case.callspec.params
    axes = [tuple(_names(marker)) for marker in case.iter_markers("parametrize")]
    in_markers = {name for names in axes for name in names}
    axes += [(name,) for name in params if name not in in_markers]
    return tuple((names, tuple(id(params[name]) for name in names)) for names in sorted(axes))


def _names(marker):
    """Return the names that a `parametrize` gives values to."""
    names = marker.args[0] if marker.args else marker.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def _spread(count, wanted):
    """Return the numbers of the cases to run, from the first to the last, evenly spread.

    >>> sorted(_spread(9, 3)), sorted(_spread(2, 3)), sorted(_spread(4, 1))
    ([0, 4, 8], [0, 1], [0])
    """
    steps = max(1, wanted - 1)
    return {at * (count - 1) // steps for at in range(min(wanted, count))} if wanted < count else set(range(count))


def _sample(cases):
    """Return the numbers of cases that together show every combination of values, greedily the most new ones first.

    >>> sorted(_sample([(("a", i), ("b", j)) for i in range(3) for j in range(3)]))
    [0, 4, 8]
    """
    together = 1 if len(cases[0]) <= 2 else 2
    if len(cases[0]) == 1:  # a list of cases, not a grid
        return set(range(len(cases)))
    shown = [set(itertools.combinations(case, together)) for case in cases]
    missing, chosen = set().union(*shown), set()
    while missing:
        best = max(range(len(cases)), key=lambda at: len(shown[at] & missing))
        chosen.add(best)
        missing -= shown[best]
    return chosen


# ---- nothing is left behind


def pytest_configure(config):
    """Begin the session: mark its processes, and take Ctrl-C as usual even if the suite was started with it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _is_first(config):
        os.environ[_MARK] = uuid.uuid4().hex
        _use_own_temporary_folder()
        config.stash[_BEFORE] = _files()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail the session if a process, a file in the temporary folder or shared memory of a test is still there."""
    if not _is_first(session.config):
        return
    end = time.monotonic() + _PATIENCE_SECONDS
    while (found := _processes(os.environ[_MARK])) and time.monotonic() < end:
        time.sleep(0.2)
    for number, _ in found:
        os.kill(number, signal.SIGKILL)
    left = sorted(_files() - session.config.stash[_BEFORE])
    if found or left:
        sys.stderr.write(f"\nthe tests left behind: processes: {found}, files: {left}\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _use_own_temporary_folder():
    """Let this session's files have a folder of their own: other programs may write to the shared one meanwhile."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps the folders of recent sessions
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="penstock-tests-")
    tempfile.tempdir = None  # read TMPDIR again
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)  # after multiprocessing's own clean-up


def _is_first(config):
    """Return whether this process runs the whole session, and not a share of it for xdist."""
    return not hasattr(config, "workerinput")


def _processes(mark):
    """Return the processes that tests of this session started, directly or not, and that are still there."""
    found, wanted = [], f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            number = int(folder.name)
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # without xdist, the server that forks for tests, and Python's trackers, end with this process
        if is_ours and command and number != os.getpid() and "multiprocessing." not in command:
            found.append((number, command[:200]))
    return found


def _files():
    """Return what tests may leave: shared memory, and Penstock's own files in the temporary folder."""
    places = [(Path("/dev/shm"), "*"), (Path(tempfile.gettempdir()), "penstock*")]
    return {str(path) for place, pattern in places if place.is_dir() for path in place.glob(pattern)}
