"""Spare process: do all imports, then wait to replace a lost training process."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_STANDARD = (("stdout", 1), ("stderr", 2))


def main(words: Sequence[str]) -> None:
    """Do the imports, wait for a job as a line of JSON on stdin, and run it; leave at the end of stdin.

    Args:
        words: the process number of the launcher, with which this process ends, and the configuration file.
    """
    from penstock.faults.orphans import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end silently, as at SIGTERM: nothing has started
    die_with_parent(parent=int(words[0]))
    with suppress(Exception):  # a training process will report the same error
        _warm_up(Path(words[1]))
    from penstock.launch.processes.worker_process import enter

    line = sys.stdin.readline()
    if not line:
        return
    job = json.loads(line)
    os.environ.clear()
    os.environ.update(job["env"])
    for name, number in _STANDARD:
        if job[name]:  # the launcher has created the file
            file = os.open(Path(job[name]), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(file, number)
            os.close(file)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv[1:] = job["words"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter(job["words"])


def _warm_up(path: Path) -> None:
    """Import what a training needs, and what torch imports to capture a model; run no user code."""
    import torch
    from torch import nn

    import penstock.launch.build.trainer_builder
    import penstock.launch.processes.train_process
    import penstock.training.view.view  # noqa: F401
    from penstock.launch.build.named_parts import build_model
    from penstock.launch.config.config_reader import read_config
    from penstock.model.capture.capture import capture

    capture(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(2, 2), training=True, path="export")
    config = read_config(path).config
    is_own = isinstance(config.model, str) and ":" in config.model and not config.model.startswith("penstock:")
    if not is_own:
        with torch.device("meta"):
            build_model(config)


if __name__ == "__main__":
    main(sys.argv[1:])
