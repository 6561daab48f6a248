"""Patches: a convolution whose windows lie side by side, as one product of matrices.

    image (n, c, H·k, W·k) ──► a row for each patch (n, H, W, c·k·k) ──► times the weight (n, H, W, o) ──► (n, o, H, W)

So vision transformers begin. cuDNN's kernels for half precision want channels in multiples of 8, and an image has 3: on
an H200 the 32 × 32 patches of one image take 346 µs as a convolution, and 12 as a product. Small patches are quicker as
they are (docs/design/gpu.md). The sums are the same, and are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["as_products", "is_convolution"]

aten = torch.ops.aten
_CONVOLUTIONS: dict[object, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_DEFAULTS: tuple[Any, ...] = (None, 1, 0, 1, 1)  # bias, stride, padding, dilation, groups
_MOST_CHANNELS = 7  # with more of them cuDNN has kernels of its own
_LEAST_NUMBERS = 192  # in a patch, as 8 × 8 × 3; of 4 × 4 × 3 the product took up to 1.4 times as long


def is_convolution(node: fx.Node) -> bool:
    """Return whether a node is a convolution, over patches or not."""
    return node.op == "call_function" and node.target in _CONVOLUTIONS


def as_products(graph: fx.Graph, shown: Mapping[fx.Node, Any]) -> int:
    """Put products in the place of convolutions over patches; return how many there were.

    Args:
        graph: is changed.
        shown: what each node makes for the example, with or without memory.
    """
    found = [(node, shown[_arguments(node)[1]].shape[2:]) for node in graph.nodes if _is_over_patches(node, shown)]
    for node, window in found:
        with graph.inserting_before(node):
            product = _product(graph, node, window)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    return len(found)


def _is_over_patches(node: fx.Node, shown: Mapping[fx.Node, Any]) -> bool:
    if not is_convolution(node):
        return False
    count = _CONVOLUTIONS[node.target]
    image_node, weight_node, _, stride, padding, dilation, groups = _arguments(node)
    if not {image_node, weight_node, node} <= shown.keys():  # of a nested graph
        return False
    image, weight, made = shown[image_node], shown[weight_node], shown[node]
    window = tuple(weight.shape[2:])
    return (
        _each(stride, count) == window != (1,) * count
        and (_each(padding, count), _each(dilation, count), groups) == ((0,) * count, (1,) * count, 1)
        and weight.shape[1] <= _MOST_CHANNELS
        and weight.shape[1:].numel() >= _LEAST_NUMBERS
        and image.dim() == count + 2
        and made.stride() == torch.empty(made.shape, device="meta").stride()  # channels do not come last in it
        and _is_as_exact(image.dtype)
    )


def _is_as_exact(dtype: torch.dtype) -> bool:
    """Return whether products are not rounded more than convolutions, as the user has set it."""
    products = torch.backends.cuda.matmul.fp32_precision
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return dtype is not torch.float32 or products != "tf32" or convolutions == "tf32"


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return image, weight, bias, stride, padding, dilation and groups of a convolution."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(names[2:], _DEFAULTS, strict=True))
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(given[name] for name in names)


def _each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _product(graph: fx.Graph, node: fx.Node, window: Sequence[int]) -> fx.Node:
    image, weight, bias, *_ = _arguments(node)
    count = len(window)
    rows = image
    for at, size in enumerate(window):  # what is left over at the end is left out, as the convolution does
        rows = graph.call_function(aten.unfold.default, (rows, 2 + at, size, size))
    order = [0, *range(2, 2 + count), 1, *range(2 + count, 2 + 2 * count)]
    rows = graph.call_function(aten.permute.default, (rows, order))
    rows = graph.call_function(aten.flatten.using_ints, (rows, 1 + count))
    matrix = graph.call_function(aten.flatten.using_ints, (weight, 1))
    made = graph.call_function(aten.linear.default, (rows, matrix, bias))
    made = graph.call_function(aten.permute.default, (made, [0, 1 + count, *range(1, 1 + count)]))
    return graph.call_function(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
