"""Measure the host memory and the time that loading takes, per process, beside plain from_pretrained.

python benchmarks/load/run.py --gib 4 --processes 4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
BOUND = (1.15, 100)  # times the own stages, plus MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the stored weights in float32")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--child", choices=("ours", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(
            "\n" + json.dumps({"ours": ours, "plain": plain}[options.child](options.folder, options.dtype)), flush=True
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", "plain", "--folder", folder, "--dtype"]
        make(folder, options.gib)
        print(f"{'':28}{'process':>8}{'own MiB':>9}{'peak MiB':>10}{'peak / own':>12}{'bound':>9}{'s':>7}")
        for dtype in ("float32", "bfloat16"):
            words = "as stored" if dtype == "float32" else "cast to bfloat16"
            for row in outputs([*command, dtype]):
                show(f"from_pretrained, {words}", row)
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={options.processes}",
            ]
            for row in outputs([*launch, __file__, "--child", "ours", "--folder", folder, "--dtype", dtype]):
                show(f"Penstock, {words}", row)


def outputs(command: list[str]) -> list[dict[str, float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        sys.exit(done.stderr[:6000])
    return sorted(rows, key=lambda row: row["process"])


def show(what: str, row: dict[str, float]) -> None:
    limit = BOUND[0] * row["own"] + BOUND[1]
    verdict = "within" if row["peak"] <= limit else "over"
    print(
        f"{what:28}{row['process']:8.0f}{row['own']:9.0f}{row['peak']:10.0f}{row['peak'] / row['own']:12.2f}"
        f"{verdict:>9}{row['seconds']:7.1f}"
    )


def config(gib: float | None = None, folder: str | None = None):  # noqa: ANN201 - a config of transformers
    from transformers import LlamaConfig

    if folder is not None:
        return LlamaConfig.from_pretrained(folder)
    width, inner, words = 2048, 5632, 32000  # as TinyLlama, with 22 layers for 4 GiB
    per_layer = 2 * width * width + width * width // 4 + 3 * width * inner + 2 * width
    layers = max(2, round((gib * (1 << 30) / 4 - 2 * words * width) / per_layer))
    return LlamaConfig(
        hidden_size=width, intermediate_size=inner, vocab_size=words, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def make(folder: str, gib: float) -> None:
    """Write a random model, in a process of its own."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import run, torch;"
        "from transformers import LlamaForCausalLM;"
        f"LlamaForCausalLM(run.config({gib})).save_pretrained({folder!r}, max_shard_size='1GB')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def resident(what: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def plain(folder: str, dtype: str) -> dict[str, float]:
    import torch
    from transformers import LlamaForCausalLM

    before, begin = forget_peak(), time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    seconds = time.perf_counter() - begin
    own = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    for parameter in model.parameters():  # its file is mapped, and counts once it is read
        parameter.detach().view(-1)[::512].sum()
    return {"process": 0, "own": own, "peak": resident("VmHWM") - before, "seconds": seconds}


def ours(folder: str, dtype: str) -> dict[str, float]:
    import torch
    import torch._dynamo
    import torch.export
    from transformers import LlamaForCausalLM

    import penstock
    import penstock.pipeline.pipeline

    torch.manual_seed(0)  # as under torchrun: all processes need the same seed
    settings = config(folder=folder)
    tokens = torch.ones(4, 8, dtype=torch.long)
    before, begin = forget_peak(), time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(settings).to(getattr(torch, dtype))
    pipe = penstock.Pipeline(model, example={"input_ids": tokens, "labels": tokens}, micro_batches=4, weights=folder)
    seconds, peak = time.perf_counter() - begin, resident("VmHWM") - before
    own = sum(parameter.nbytes for parameter in pipe.parameters()) / MIB
    pipe.close()
    return {"process": pipe.lanes[0], "own": own, "peak": peak, "seconds": seconds}


if __name__ == "__main__":
    main()
