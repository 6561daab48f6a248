"""Measure how long a save stops the training; compare with save and async_save of torch.distributed.checkpoint.

python benchmarks/checkpoint/run.py --millions 4 --rounds 5
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

import penstock
from penstock.checkpoint import tensor_shards as shards
from penstock.tensor_files.tensor_shards import bytes_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=16, help="millions of parameters; AdamW triples that")
    parser.add_argument("--width", type=int, default=512, help="width of each layer, and so the size of the tensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to test; by default a temporary folder")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    # async_save needs a process group, even with one process
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    count = max(2, round(options.millions * 1e6 / options.width**2))
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(count)))
    batch = torch.randn(8, options.width, device=options.device)
    print(
        f"{count} layers of {options.width}², {options.rounds} rounds and one to warm up, on {options.device}",
        flush=True,
    )
    pipe = penstock.Pipeline(
        model, example=batch, loss=nn.MSELoss(), devices=[options.device] * 2, micro_batches=2, cuts=[count // 2]
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(batch, torch.randn(8, options.width, device=options.device))
    optimizer.step()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows, num_bytes = measure(pipe, model, optimizer, folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows, num_bytes, options)
    pipe.close()
    dist.destroy_process_group()


def measure(
    pipe: penstock.Pipeline, model: nn.Module, optimizer: Optimizer, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each kind in each round. Kinds run in turn, so that load on the machine affects all."""
    tensors = [*pipe.state_dict().values()]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    places = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
    rows: dict[str, list[float]] = {}

    def note(name: str, begin: float) -> None:
        rows.setdefault(name, []).append(time.perf_counter() - begin)

    with penstock.Checkpoints(folder / "ours", pipe, optimizer=optimizer, keep=1) as checkpoints:
        for number in range(options.rounds + 1):
            begin = time.perf_counter()
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            synchronize(options.device)
            note("only the copy", begin)
            begin = time.perf_counter()
            for place in places:
                xxhash.xxh3_128_digest(bytes_of(place))
            note("only hashing", begin)
            begin = time.perf_counter()
            checkpoints.save(number)
            note("Penstock: save() returns", begin)
            checkpoints.wait()
            note("Penstock: on disk", begin)
            with without_checksums():
                begin = time.perf_counter()
                checkpoints.save(1000 + number)
                checkpoints.wait()
                note("Penstock: on disk, without checksums of tensors", begin)
            begin = time.perf_counter()
            save_plainly(model, optimizer, folder / f"dcp {number}")
            note("torch: save()", begin)
            begin = time.perf_counter()
            waiting = save_asynchronously(model, optimizer, folder / f"async {number}")
            note("torch: async_save() returns", begin)
            waiting.result()
            note("torch: async_save on disk", begin)
            for path in folder.iterdir():
                if path.name != "ours":
                    shutil.rmtree(path)
    assert not checkpoints.failures
    return {name: times[1:] for name, times in rows.items()}, sum(t.numel() * t.element_size() for t in tensors)


class NoChecksum:
    def update(self, data: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


@contextmanager
def without_checksums() -> Iterator[None]:
    real, shards.xxhash = shards.xxhash, SimpleNamespace(
        xxh3_128=NoChecksum, xxh3_128_hexdigest=xxhash.xxh3_128_hexdigest
    )  # fmt: skip
    try:
        yield
    finally:
        shards.xxhash = real


def save_plainly(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    states, optimizers = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": optimizers}, checkpoint_id=path)


def save_asynchronously(model: nn.Module, optimizer: Optimizer, path: Path) -> Future:
    states, optimizers = get_state_dict(model, optimizer)
    return dcp.async_save({"model": states, "optimizer": optimizers}, checkpoint_id=path)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def show(rows: dict[str, list[float]], num_bytes: int, options: argparse.Namespace) -> None:
    print(f"{num_bytes / 2**20:.0f} MiB on {options.device}, {options.rounds} rounds, torch {torch.__version__}, "
          f"{platform.machine()}, {torch.get_num_threads()} threads\n")  # fmt: skip
    print("| | ms | lowest–highest | ÷ copy |\n|---|---|---|---|")
    copy = statistics.median(rows["only the copy"])
    for name, times in rows.items():
        middle = statistics.median(times)
        print(f"| {name} | {middle * 1e3:.1f} | {min(times) * 1e3:.1f}–{max(times) * 1e3:.1f} | {middle / copy:.2f} |")
    bare = rows["Penstock: on disk, without checksums of tensors"]
    shares = [a / b - 1 for a, b in zip(rows["Penstock: on disk"], bare, strict=True)]
    spread = f"{min(shares):+.1%} to {max(shares):+.1%}"
    print(f"\nChecksums make a save longer by {statistics.median(shares):+.1%} ({spread}).")


if __name__ == "__main__":
    main()
