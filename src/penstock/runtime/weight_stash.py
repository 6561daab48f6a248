"""Weight stash: versions of the weights for asynchronous schedules, in which weights change within a step.

A forward uses a copy of the weights at its version, and its backward uses the same copy. An update sums the gradients
that all copies got since the last update, lets the optimizer change the parameters, and copies the result as the next
version. A copy is dropped after the last action that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.model.stages import Stage


class WeightVersions:
    """The versions of the weights of a lane's stages; `last_use` is that of the lane's program."""

    def __init__(
        self, stages: Mapping[int, Stage], optimizers: Mapping[int, torch.optim.Optimizer],
        last_use: Mapping[tuple[int, int], int],
    ) -> None:  # fmt: skip
        self._stages, self._optimizers, self._last_use = stages, optimizers, last_use
        self._own = {
            index: {name: p for name, p in stage.named_parameters() if p.requires_grad}
            for index, stage in stages.items()
        }
        self._copies: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._in_use: dict[int, int] = {}

    def use(self, stage: int, version: int) -> None:
        """Set the weights of a stage to a version, for its next forward."""
        if self._in_use.get(stage) == version:
            return
        if (stage, version) not in self._copies:
            self._copies[stage, version] = self._copy(stage)
        for name, tensor in self._copies[stage, version].items():
            self._stages[stage].held.set(name, tensor)
        self._in_use[stage] = version

    def update(self, stage: int, version: int, at: int) -> None:
        """Update a stage's weights with the gradients since the last update, and store them as the next version."""
        has_any = False
        for name, parameter in self._own[stage].items():
            gradients = []
            for (of_stage, _), copies in self._copies.items():
                gradient = copies[name].grad if of_stage == stage else None
                if gradient is not None:
                    gradients.append(gradient)
                    copies[name].grad = None
            if gradients:
                parameter.grad = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0]
                has_any = True
        if has_any:
            self._optimizers[stage].step()
            self._optimizers[stage].zero_grad(set_to_none=True)
        for key in [k for k in self._copies if k[0] == stage and self._last_use.get(k, -1) < at]:
            del self._copies[key]
        self._copies[stage, version] = self._copy(stage)

    def end(self) -> None:
        """Put the parameters back into the stages, and drop all copies."""
        for stage in self._in_use:
            for name, parameter in self._own[stage].items():
                self._stages[stage].held.set(name, parameter)
        self._in_use.clear()
        self._copies.clear()

    def _copy(self, stage: int) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone().requires_grad_(True) for name, p in self._own[stage].items()}
