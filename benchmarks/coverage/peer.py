"""Run the unchanged models with torch.distributed.pipelining.pipeline(), cut between evenly spaced layers.

The stages run in order in this process. The comparison favours the peer. It ignores the structure of outputs, which
pipeline() does not keep. If pipeline() copies a parameter into several stages, the gradients of the copies are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compare import Batch, Outcome, named_buffers, seed_all, tensors_of, weighted
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.utils import _pytree as pytree

__all__ = ["layers_of", "run_peer"]


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of the layers to cut between: children of lists of modules, or else the model's own children."""
    found: list[str] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
                found.extend(f"{full}.{index}" for index in range(len(child)))
            else:
                walk(child, full)

    if not isinstance(model, nn.Sequential):
        walk(model, "")
    return found or [name for name, _ in model.named_children()]


def run_peer(model: nn.Module, batch: Batch, stages: int, plain: Outcome) -> Outcome:
    """Return the results of torch's own pipeline of a model for a batch."""
    layers = layers_of(model)
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} layers to cut between, {stages} stages")
    spec = {layers[len(layers) * k // stages]: SplitPoint.BEGINNING for k in range(1, stages)}
    pipe = pipeline(model, batch.args, batch.kwargs, split_spec=spec)
    if pipe.num_stages != stages:
        raise ValueError(f"made {pipe.num_stages} stages, not {stages}")
    modules = [module for name, module in pipe.split_gm.named_children() if name.startswith("submod_pp")]
    for parameter in (*model.parameters(), *(p for module in modules for p in module.parameters())):
        parameter.grad = None
    seed_all()
    out = fx.Interpreter(pipe.split_gm).run(*_flat_inputs(pipe, batch))
    tensors = [x for _, x in tensors_of(out)]
    names = [name for name in plain.outputs if name != "the loss"]
    if len(tensors) != len(names):
        raise ValueError(f"returned {len(tensors)} tensors, not {len(names)}")
    loss = tensors[names.index(plain.own_loss)].sum() if plain.own_loss else weighted(tensors)
    outputs = {name: x.detach().clone() for name, x in zip(names, tensors, strict=True)}
    outputs["the loss"] = loss.detach().clone()
    if loss.requires_grad:
        loss.backward()
    buffers = {name: x.detach().clone() for name, x in named_buffers(model, modules)}
    return Outcome(plain.shape, plain.own_loss, outputs, _gradients(model, modules), buffers)


def _flat_inputs(pipe: Pipe, batch: Batch) -> list[Any]:
    names = [node.target for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]
    if set(names) <= set(batch.kwargs):
        return [batch.kwargs[name] for name in names]
    return pytree.tree_leaves((batch.args, batch.kwargs))


def _gradients(model: nn.Module, modules: Sequence[nn.Module]) -> dict[str, Tensor | None]:
    first: dict[int, str] = {}
    own_name: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own_name[name] = first.setdefault(id(parameter), name)
    grads: dict[str, Tensor | None] = dict.fromkeys(first.values())
    for parameter in {id(p): (name, p) for module in modules for name, p in module.named_parameters()}.values():
        name, grad = own_name.get(parameter[0], parameter[0]), parameter[1].grad
        earlier = grads.get(name)
        grads[name] = earlier if grad is None else grad.clone() if earlier is None else earlier + grad
    return grads
