"""Processes that end with their parent, however that ended."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import penstock.faults.orphans
from penstock.errors import UsageError

_SECONDS = 20.0

# a parent that starts two workers and waits; a worker says that it is there and then sleeps
PARENT = """
    import subprocess, sys, time
    workers = [subprocess.Popen([sys.executable, "-c", sys.argv[1], str(n)]) for n in range(2)]
    print(*(worker.pid for worker in workers), flush=True)
    time.sleep(60)
"""
WORKER = """
    import sys, time
    from penstock.faults import orphans
    if sys.argv[1] == "0":
        orphans._request_death_signal = lambda: None  # as where there is no such kernel
    orphans.die_with_parent()
    print("ready", flush=True)
    time.sleep(60)
"""
PIPED = """
    import sys, time
    from penstock.faults import orphans
    orphans._request_death_signal = lambda: None
    orphans._look = lambda parent: None
    orphans.die_with_parent(pipe=int(sys.argv[1]))
    print("ready", flush=True)
    time.sleep(60)
"""


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pids):
    """Return whether processes end in time."""
    end = time.monotonic() + _SECONDS
    while any(map(is_there, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_there, pids))


def test_workers_end_when_their_parent_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), textwrap.dedent(WORKER)], stdout=subprocess.PIPE, text=True
    ) as parent:
        lines = [parent.stdout.readline().strip() for _ in range(3)]
        pids = [int(word) for line in lines for word in line.split() if word != "ready"]
        assert lines.count("ready") == 2
        assert len(pids) == 2
        assert all(map(is_there, pids))
        parent.send_signal(signal.SIGKILL)
        assert ends(pids)


def test_a_pipe_tells_too():
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PIPED), str(reading)],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(reading,),
    ) as child:
        os.close(reading)
        assert child.stdout.readline() == "ready\n"
        os.close(writing)
        assert child.wait(_SECONDS) == -signal.SIGKILL


def test_a_parent_that_is_gone_already():
    code = "from penstock.faults.orphans import die_with_parent; die_with_parent(parent=1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


FORKING = """
    import os, time
    from penstock.faults import orphans
    orphans.end_forks_with_this_process()
    orphans.end_forks_with_this_process()  # twice is as good as once
    pid = os.fork() or (os.fork() or time.sleep(60)) and time.sleep(60)  # a child that has a child
    print(pid, flush=True)
    os._exit(0)
"""


def test_forks_that_hang_end_with_their_process():
    """A worker of a data loader that hung in the user's code outlived its training."""
    command = [sys.executable, "-c", textwrap.dedent(FORKING)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_SECONDS)
    assert ends([int(done.stdout)])


def test_a_pipe_that_is_none_is_refused():
    with pytest.raises(UsageError, match="is not open"):
        penstock.faults.orphans.die_with_parent(pipe=1 << 20)


def test_torch_is_not_needed():
    code = "import sys, penstock.faults.orphans, penstock.faults.injector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LEAKING = '''
    """What the fixture is for: a test that leaves something behind fails."""
    import os, subprocess, sys, threading, time

    def test_process():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])

    def test_thread():
        threading.Thread(target=time.sleep, args=(30,), name="penstock-left", daemon=True).start()

    def test_file():
        test_file.kept = open(os.devnull)

    def test_nothing():
        with open(os.devnull):
            pass
'''


def test_the_fixture_finds_what_is_left(tmp_path):
    """In a run of its own, with little patience: three tests leave something, the fourth does not."""
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text(
        (here / "conftest.py").read_text().replace("_SECONDS = 10.0", "_SECONDS = 0.2")
    )
    (tmp_path / "test_leaks.py").write_text(textwrap.dedent(LEAKING))
    (tmp_path / "processes.py").write_text("def warm():\n    pass\n")  # nothing to warm
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    for name in ("process", "thread", "file"):
        assert re.search(rf"test_leaks\.py::test_{name}\b", run.stdout), run.stdout
    assert "4 passed, 3 errors" in run.stdout
    for line in run.stdout.splitlines():  # and what it left is not left for long
        if "'processes': {" in line:
            os.kill(int(line.partition("'processes': {")[2].partition("}")[0]), signal.SIGKILL)
            break
