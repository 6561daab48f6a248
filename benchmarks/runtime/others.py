"""Peers from PyPI in their own environment (see peers_env): torchgpipe, fairscale and DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

import torch
from tasks import Case, Task, forget, gradients_of
from torch import Tensor, nn


class GPipes:
    """torchgpipe's GPipe, and fairscale's Pipe, which is derived from it: one thread per device, fill and drain.

    Both treat all CPU "devices" as one, so one thread runs all stages in turn.
    """

    def __init__(self, name: str, case: Case, task: Task) -> None:
        if name == "torchgpipe":
            from torchgpipe import GPipe as Pipe
        else:
            from fairscale.nn import Pipe

        self.stages, self.loss = task.stages, task.loss
        count = len(task.stages)
        self.pipe = Pipe(
            nn.Sequential(*task.stages),
            [1] * count,
            devices=["cpu"] * count,
            chunks=case.micro_batches,
            checkpoint="never",
        )

    def step(self, batch: Tensor, target: Tensor) -> Tensor:
        loss = self.loss(self.pipe(batch), target)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(dict(enumerate(self.stages)))

    def forget(self) -> None:
        forget(self.stages)

    def close(self) -> None:
        pass


_RATE = 1024.0  # a large power of two: the rounding of weights is small compared with the update


class DeepSpeed:
    """DeepSpeed's pipeline engine, on gloo: 1F1B with blocking sends. Its step includes a step of the optimizer.

    DeepSpeed drops gradients within its step. They are computed from how far plain SGD moved the weights.
    """

    def __init__(self, case: Case, task: Task, lane_of: list[int]) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        deepspeed.utils.logger.setLevel("ERROR")
        self.num_mbs = case.micro_batches
        rank = torch.distributed.get_rank()
        self.stages = {s: stage for s, stage in enumerate(task.stages) if lane_of[s] == rank}
        module = PipelineModule(
            layers=task.stages,
            num_stages=case.lanes,
            loss_fn=task.loss,
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        self.optimizer = torch.optim.SGD(module.parameters(), lr=_RATE)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": len(task.batch) // case.micro_batches,
            "gradient_accumulation_steps": case.micro_batches,
            "steps_per_print": 1 << 30,
        }
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=self.optimizer, config=config)
        self.before = self._weights()

    def step(self, batch: Tensor, target: Tensor) -> Tensor:
        pairs = zip(batch.chunk(self.num_mbs), target.chunk(self.num_mbs), strict=True)
        return self.engine.train_batch(iter(pairs))

    def gradients(self) -> dict[str, Tensor]:
        return {name: (self.before[name] - weight) / _RATE for name, weight in self._weights().items()}

    @torch.no_grad()
    def forget(self) -> None:
        if self.optimizer.param_groups[0]["lr"]:  # only once, after the gradients were read
            for name, parameter in self._named():
                parameter.copy_(self.before[name])
            self.optimizer.param_groups[0]["lr"] = 0.0

    def close(self) -> None:
        pass

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._named()}

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"{s}.{name}", p) for s, stage in self.stages.items() for name, p in stage.named_parameters()]
