"""Terminals: run the command as in a terminal, and read what a person would see."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

COMMAND = (sys.executable, "-m", "penstock")
ENVIRONMENT = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "OMP_NUM_THREADS": "1"}


def in_terminal(*words, stop_at=None, seconds=60):
    """Run the command with a terminal as its output; return its exit code and all it wrote. Ctrl-C it at some words."""
    leader, follower = os.openpty()
    process = subprocess.Popen([*COMMAND, *map(str, words)], stdout=follower, stderr=follower, env=ENVIRONMENT)
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 1 << 16):
            seen += chunk
            if stop_at is not None and stop_at in seen.decode(errors="ignore"):
                process.send_signal(signal.SIGINT)
                stop_at = None
    except OSError:  # how a terminal says that nobody writes any more
        pass
    finally:
        os.close(leader)
    return process.wait(seconds), seen.decode()


def plain(text):
    """Return text without what a terminal does not show as such."""
    return re.sub(r"\033\[[\d;?]*\w", "", text)
