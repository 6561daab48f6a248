"""Worker: one process of a training, `torchrun -m penstock.launch.worker run.toml`."""

import sys

from penstock.launch.processes.worker_process import enter

if __name__ == "__main__":
    enter(sys.argv[1:])
