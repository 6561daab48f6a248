"""Measure how long a profile takes and how well the sum of its nodes predicts the model; compare with other profilers.

    .venv/bin/python benchmarks/profile/run.py [--quick] [--device cuda] [--threads 1] [--only WORD]

For every model, the table shows the seconds of

- `measure` and `analytic`;
- seven passes over the whole model that time the forward and the backward of every node once (torchgpipe's
  `balance_by_time` does this until its timeout);
- one run of the model for each repeat of each node (computed, not measured).

Then it shows, for `measure` and for the passes, the sum of the nodes' seconds divided by the seconds of the plain
model, forward and backward. Each figure is the median of several rounds; each round runs all methods in turn. With one
thread on the CPU, the plain model is timed in CPU seconds: other work on the machine lengthens a long step, but mostly
falls between the short calls of a profile.
"""

import argparse
import gc
import platform
import statistics
import time

import torch
from torch import nn

from penstock.model.capture.capture import Captured, capture
from penstock.model.profiling.analytic import analytic
from penstock.model.profiling.measure import measure
from penstock.model.visit import RunNode

PASSES = 7  # `measure` times as many bursts of each node
STEPS = 7


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        changes = stride != 1 or width_in != out
        self.skip = (
            nn.Sequential(nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if changes
            else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.body(x) + self.skip(x))


def resnet_50() -> nn.Module:
    blocks, width_in = [], 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(width_in, width, stride if index == 0 else 1))
            width_in = 4 * width
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def gpt2(num_layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=width // 64, vocab_size=8000, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def cases(is_gpu: bool) -> dict:
    width, batch = (1024, 4096) if is_gpu else (256, 64)
    ids = torch.randint(0, 8000, (16, 1024) if is_gpu else (2, 128))
    # capture needs a prime that divides no width, to tell the batch size from widths: leave 23 free
    uneven = [width for width in range(256 if is_gpu else 64, 2048, 2 if is_gpu else 1) if width % 23][:501]
    return {
        "MLP, 500 equal layers": (
            nn.Sequential(*(layer for _ in range(500) for layer in (nn.Linear(width, width), nn.ReLU()))),
            torch.randn(batch, width),
        ),
        "MLP, 500 different layers": (
            nn.Sequential(*(layer for k in range(500) for layer in (nn.Linear(uneven[k], uneven[k + 1]), nn.ReLU()))),
            torch.randn(batch, uneven[0]),
        ),
        "conv chain, 250 × (conv, norm, relu)": (
            nn.Sequential(
                *(
                    layer
                    for _ in range(250)
                    for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
                )
            ),
            torch.randn(64 if is_gpu else 4, 16, 16, 16),
        ),
        "GPT-2, 12 layers": (gpt2(12, 768 if is_gpu else 256), {"input_ids": ids, "labels": ids}),
        "ResNet-50": (resnet_50(), torch.randn(64 if is_gpu else 4, 3, *((224, 224) if is_gpu else (64, 64)))),
    }


def loss_of(model: nn.Module, example: object) -> torch.Tensor:
    result = model(**example) if isinstance(example, dict) else model(example)
    return result.sum() if isinstance(result, torch.Tensor) else result.loss


def model_seconds(model: nn.Module, example: object, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of forward and of backward; gradients are added to the existing ones."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    forward, backward = [], []
    for _ in range(STEPS + 2):
        synchronize()
        begin = clock()
        loss = loss_of(model, example)
        synchronize()
        middle = clock()
        loss.backward()
        synchronize()
        forward.append(middle - begin)
        backward.append(clock() - middle)
    return statistics.median(forward[2:]), statistics.median(backward[2:])


def whole_passes(captured: Captured, device: torch.device) -> tuple[float, float, float]:
    """Time the forward and the backward of each node once in each of several passes over the whole model.

    Returns:
        The seconds of all passes, and the sums of the nodes' medians, forward and backward.
    """
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    values, nodes = captured.graph.values, captured.graph.nodes
    forward = [[] for _ in nodes]
    backward = [[] for _ in nodes]

    def visitor(index: int, run: RunNode, inputs: list, parameters: list) -> list:
        wants = [values[v].has_grad for v in nodes[index].inputs]
        leaves = [t.detach().clone().requires_grad_(w) for t, w in zip(inputs, wants, strict=True)]
        given = [t.clone() for t in leaves]
        synchronize()
        begin = time.perf_counter()
        outputs = run(given, parameters)
        synchronize()
        forward[index].append(time.perf_counter() - begin)
        wanted = [t for t in (*leaves, *parameters) if t.requires_grad]
        roots = [t for t in outputs if t.requires_grad]
        if wanted and roots:
            grads = [torch.ones_like(t) for t in roots]
            synchronize()
            begin = time.perf_counter()
            torch.autograd.grad(roots, wanted, grads, allow_unused=True)
            synchronize()
            backward[index].append(time.perf_counter() - begin)
        return [t.detach() for t in outputs]

    begin = time.perf_counter()
    for _ in range(PASSES):
        captured.visit(visitor)
    seconds = time.perf_counter() - begin
    sums = [sum(statistics.median(times) for times in column if times) for column in (forward, backward)]
    return seconds, sums[0], sums[1]


def show(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def run_case(name: str, model: nn.Module, example: object, device: torch.device, rounds: int) -> str:
    model = model.to(device)
    example = {k: v.to(device) for k, v in example.items()} if isinstance(example, dict) else example.to(device)
    begin = time.perf_counter()
    captured = capture(model, example, path="export")  # makes operations the nodes, also for nn.Sequential
    capture_seconds = time.perf_counter() - begin
    taken, counted, ours, theirs, steps, passes = [], [], ([], []), ([], []), [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        profile = measure(captured)
        taken.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        analytic(captured)
        counted.append(time.perf_counter() - begin)
        plain = model_seconds(model, example, device)
        steps.append(sum(plain))
        sums = profile.forward.sum(), (profile.input_grad + profile.weight_grad).sum()
        seconds, *peer = whole_passes(captured, device)
        passes.append(seconds)
        for kind in range(2):
            ours[kind].append(sums[kind] / plain[kind])
            theirs[kind].append(peer[kind] / plain[kind])
    step, nodes = statistics.median(steps), len(captured.graph.nodes)
    cells = [name, f"{nodes:,}", f"{capture_seconds:.1f}", show(taken), show(counted), show(passes)]
    cells += [f"{nodes * PASSES * step:,.0f}", f"{step * 1e3:.1f}", *map(show, ours), *map(show, theirs)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="number of torch threads; by default torch chooses")
    parser.add_argument("--only", default="", help="only models whose name contains this word")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    print(f"torch {torch.__version__}, {where}\n")
    print(
        "| model | nodes | capture s | measure s | analytic s | 7 whole passes s | one run per node and repeat s ",
        end="",
    )
    print("| step ms | sum of nodes ÷ model: forward | backward | 7 passes ÷ model: forward | backward |")
    print("|---" * 12 + "|", flush=True)
    for name, (model, example) in cases(device.type == "cuda").items():
        if options.only in name:
            torch.manual_seed(0)
            print(run_case(name, model, example, device, 1 if options.quick else 5), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
