"""The smallest script for torchrun: import torch, join the process group, add one number, and wait."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
if dist.get_rank() == 0:
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"{time.time()}\n")
Path(sys.argv[1]).with_name(f"process {dist.get_rank()}").write_text(str(os.getpid()))
time.sleep(3600)
