"""Every example runs as its first lines say, as a user would start it, in a small configuration."""

import importlib.util
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "120"}


def start(name, *words, folder, launcher=()):
    command = [sys.executable, *launcher, EXAMPLES / name, *words]
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
    )


def run(name, *words, folder, launcher=()):
    """Return what an example prints."""
    done = start(name, *words, folder=folder, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern, text):
    found = [float(number) for number in re.findall(pattern, text, re.M)]
    assert found, text
    assert all(map(math.isfinite, found))
    return found


def test_train_gpt(tmp_path):
    out = run("train_gpt.py", "--steps", 20, "--characters", 20, "--html", "step.html", folder=tmp_path)
    first, last = numbers(r"^step \d+: loss ([\d.]+)", out)
    assert last < first - 1
    assert "1f1b, measured" in out
    assert "predicted" in (tmp_path / "step.html").read_text()
    assert "\nThe wheel does not care how much" in out


@pytest.mark.sample(1)
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["threads", "processes"])
def test_two_lanes_reach_the_validation_loss_of_a_plain_loop(tmp_path, launcher):
    """Seed by seed; in float64 what is left is rounding."""
    out = run("same_as_plain.py", "--seeds", 2, "--steps", 8, folder=tmp_path, launcher=launcher)
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([-+\d.e]+)$", out, re.M)
    assert [row[0] for row in rows] == ["0", "1"]
    for _, plain, lanes, difference in rows:
        assert plain == lanes
        assert abs(float(difference)) < 1e-10


def test_train_gpt_has_the_same_losses_with_a_process_a_lane(tmp_path):
    words = ("train_gpt.py", "--steps", 5, "--characters", 40, "--html", "step.html")
    threads = run(*words, folder=tmp_path)
    (tmp_path / "step.html").unlink()
    processes = run(*words, folder=tmp_path, launcher=TORCHRUN)
    losses = r"^step \d+: loss ([\d.]+)"
    assert numbers(losses, processes) == pytest.approx(numbers(losses, threads), rel=1e-6)
    assert len(numbers(losses, processes)) == 2  # of the first step and the last, told by one process
    assert processes.splitlines()[-1] == threads.splitlines()[-1]  # what they write
    assert (tmp_path / "step.html").exists()


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["threads", "processes"])
def test_finetune_hf_has_the_losses_of_the_trainer_of_transformers(tmp_path, launcher):
    """Interrupted and continued; with an accumulation that the last update of the epoch lacks, and clipping."""
    words = ("finetune_hf.py", "--steps", 7, "--rows", 70, "--save-every", 2)
    first = run(*words, "--stop", 3, folder=tmp_path, launcher=launcher)
    second = run(*words, folder=tmp_path, launcher=launcher)
    assert "continues after step 3" in second
    losses, norms = (numbers(rf"^step \d+:.* {name} ([\d.]+)", first + second) for name in ("loss", "norm"))
    trainer = trained_by_transformers(tmp_path, steps=7, rows=70)
    logs = trainer.state.log_history[:-1]
    assert losses == pytest.approx([log["loss"] for log in logs], rel=1e-6)
    assert norms == pytest.approx([log["grad_norm"] for log in logs], rel=1e-5, abs=1e-6)
    exported = trainer.model.from_pretrained(tmp_path / "finetune" / "model")
    for ours, theirs in zip(exported.parameters(), trainer.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_finetune_hf_in_bf16(tmp_path):
    words = ("finetune_hf.py", "--steps", 2, "--rows", 40)
    exact, short = (
        numbers(r"^step \d+: loss ([\d.]+)", run(*words, "--folder", name, *more, folder=tmp_path))
        for name, more in (("exact", ()), ("short", ("--bf16",)))
    )
    assert short == pytest.approx(exact, rel=0.02)
    assert short[0] != exact[0]


def trained_by_transformers(folder, *, steps, rows):
    """Train with the parts of the example and the Trainer itself."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    spec = importlib.util.spec_from_file_location("finetune_hf", EXAMPLES / "finetune_hf.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Same(Trainer):
        def get_train_dataloader(self):
            return example.make_loader(example.make_rows(rows, seed=1), seed=2)

        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=example.RATE)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: max(0.0, 1 - step / steps)
            )
            return self.lr_scheduler

    args = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, gradient_accumulation_steps=2, logging_steps=1,
        max_grad_norm=example.CLIP, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Same(AutoModelForCausalLM.from_pretrained(folder / "finetune" / "start-0"), args)
    trainer.train()
    return trainer


@pytest.fixture
def cifar(tmp_path):
    """Pictures that are brighter the higher their class, in CIFAR-10's binary form."""
    source = random.Random(0)
    for name, count in {"data_batch_1.bin": 160, "data_batch_2.bin": 80, "test_batch.bin": 50}.items():
        labels = [number % 10 for number in range(count)]
        records = (bytes([label, *(25 * label + source.randrange(25) for _ in range(3072))]) for label in labels)
        (tmp_path / name).write_bytes(b"".join(records))
    return tmp_path


def test_train_cnn_on_cifar(cifar):
    out = run("train_cnn.py", "--data", cifar, "--epochs", 4, "--batch-size", 32, folder=cifar)
    assert "240 images to train with, 50 to test with" in out
    losses = numbers(r"^epoch \d+: loss ([\d.]+)", out)
    assert losses[-1] < losses[0]
    assert all(0 <= share <= 100 for share in numbers(r"([\d.]+)% of the test images right", out))


def test_train_cnn_on_digits_or_how_to_get_them(tmp_path):
    done = start("train_cnn.py", "--epochs", 2, folder=tmp_path)
    if importlib.util.find_spec("sklearn") is None:
        assert done.returncode == 1
        assert "pip install scikit-learn" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert numbers(r"^epoch 2: loss .* ([\d.]+)% of the test", done.stdout)[0] > 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "test_batch.bin").rename(folder / "test_batch"), "has no test_batch.bin"),
        (lambda folder: (folder / "data_batch_2.bin").write_bytes(b"\0" * 4000), "4000 bytes, and a picture has 3073"),
        (lambda folder: (folder / "data_batch_2.bin").write_bytes(b"\n" + b"\0" * 3072), "a class of 10"),
    ],
    ids=["the python version", "cut off", "another set"],
)
def test_train_cnn_says_what_is_wrong_with_its_data(cifar, damage, message):
    damage(cifar)
    done = start("train_cnn.py", "--data", cifar, folder=cifar)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_resnet50_halves(tmp_path):
    small = ("--size", 32, "--batch-size", 8, "--micro-batches", 2, "--steps", 2, "--cut", "layer3")
    out = run("resnet50_halves.py", *small, "--html", "halves.html", folder=tmp_path)
    assert "layer3–4" in out  # the second half
    plain, halves = numbers(r"^(?:plain|in two halves): .* loss ([\d.]+), after", out)
    assert halves == pytest.approx(plain, rel=1e-3)
    assert (tmp_path / "halves.html").exists()


def test_every_example_is_tested():
    tested = Path(__file__).read_text()
    scripts = [path for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) == 5
    assert all(f'"{path.name}"' in tested for path in scripts)
    assert all("pickle" not in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M) for path in scripts)
