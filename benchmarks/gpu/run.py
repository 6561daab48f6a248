"""Does the GPU stay full? Ours, the peer and the limit side by side, on one GPU.

    python benchmarks/gpu/run.py [training] [--only NAMES] [--repeats 10]

Medians, and in brackets from the quickest to the slowest run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="contenders, by parts of their names, with commas")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--micro-batches", default="8,32")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for count in map(int, given.micro_batches.split(",")):
        training.run(count, given.only, given.repeats)


if __name__ == "__main__":
    main()
