"""Does the GPU stay full? Compare Penstock, torch.distributed.pipelining and the limit on one GPU.

    python benchmarks/gpu/run.py [training] [cnn] [feeding] [towers] [wrong_timing] [patches] [options] [--only NAMES]
    python benchmarks/gpu/run.py training|towers --compile-only      only compile, to make the next run faster

By default, all sections run except patches and options. Figures are medians; brackets show the fastest and the slowest
run. A table at the end of the section training compares the figures with their goals.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import training

USUAL = ("cnn", "towers", "wrong_timing", "feeding", "training")
SECTIONS = (*USUAL, "patches", "options")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--only", default="", help="contenders of training: parts of their names, separated by commas")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--micro-batches", default="8,32")
    parser.add_argument("--compile-only", action="store_true", help="only fill torch's cache of compiled code")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    if wrong := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(wrong)}")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    if given.compile_only:
        for section in given.sections or ("training", "towers"):
            importlib.import_module(section).compile_only()
        return
    for section in given.sections or USUAL:
        print(f"\n{section}", flush=True)
        if section == "training":
            counts = map(int, given.micro_batches.split(","))
            found = {count: training.run(count, given.only, given.repeats) for count in counts}
            for what, value, bar in training.verdict(found):
                print(f"  {what:<40} {value:7.3f}  ({bar})", flush=True)
        else:
            importlib.import_module(section).run()


if __name__ == "__main__":
    main()
