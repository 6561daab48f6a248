"""Patch convolutions: a convolution whose windows lie side by side, as one matrix product.

    image (n, c, H·k, W·k) ──► one row per patch (n, H, W, c·k·k) ──► times the weight (n, H, W, o) ──► (n, o, H, W)

Vision transformers start like this. cuDNN's half-precision kernels need channels in multiples of 8, but an image has 3.
On an H200, the 32 × 32 patches of one image take 346 µs as a convolution and 12 µs as a product. Small patches are
faster as a convolution (docs/design/gpu.md). The sums are the same, but rounded in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_CONVOLUTIONS: dict[object, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_DEFAULTS: tuple[Any, ...] = (None, 1, 0, 1, 1)  # bias, stride, padding, dilation, groups
_MOST_CHANNELS = 7  # with more channels, cuDNN has suitable kernels
_LEAST_NUMBERS = 192  # in a patch, such as 8 × 8 × 3; for 4 × 4 × 3 the product took up to 1.4 times as long


def is_convolution(node: fx.Node) -> bool:
    """Return whether a node is a convolution, over patches or not."""
    return node.op == "call_function" and node.target in _CONVOLUTIONS


def convolutions_as_products(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> int:
    """Replace convolutions over patches by products; return how many. Values are those of an example, real or fake."""
    found = [(node, values[_arguments(node)[1]].shape[2:]) for node in graph.nodes if _is_over_patches(node, values)]
    for node, window in found:
        with graph.inserting_before(node):
            product = _product(graph, node, window)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    return len(found)


def _is_over_patches(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    if not is_convolution(node):
        return False
    count = _CONVOLUTIONS[node.target]
    image_node, weight_node, _, stride, padding, dilation, groups = _arguments(node)
    if not {image_node, weight_node, node} <= values.keys():  # it belongs to a nested graph
        return False
    image, weight, made = values[image_node], values[weight_node], values[node]
    window = tuple(weight.shape[2:])
    return (
        _each(stride, count) == window != (1,) * count
        and (_each(padding, count), _each(dilation, count), groups) == ((0,) * count, (1,) * count, 1)
        and weight.shape[1] <= _MOST_CHANNELS
        and weight.shape[1:].numel() >= _LEAST_NUMBERS
        and image.dim() == count + 2
        and made.stride() == torch.empty(made.shape, device="meta").stride()  # not channels-last
        and _is_as_exact(image.dtype)
    )


def _is_as_exact(dtype: torch.dtype) -> bool:
    """Return whether, with the user's settings, products are rounded no more than convolutions."""
    products = torch.backends.cuda.matmul.fp32_precision
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return dtype is not torch.float32 or products != "tf32" or convolutions == "tf32"


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the input, weight, bias, stride, padding, dilation and groups of a convolution."""
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
    for at, size in enumerate(window):  # ignores the remainder at the end, like the convolution
        rows = graph.call_function(aten.unfold.default, (rows, 2 + at, size, size))
    order = [0, *range(2, 2 + count), 1, *range(2 + count, 2 + 2 * count)]
    rows = graph.call_function(aten.permute.default, (rows, order))
    rows = graph.call_function(aten.flatten.using_ints, (rows, 1 + count))
    matrix = graph.call_function(aten.flatten.using_ints, (weight, 1))
    made = graph.call_function(aten.linear.default, (rows, matrix, bias))
    made = graph.call_function(aten.permute.default, (made, [0, 1 + count, *range(1, 1 + count)]))
    return graph.call_function(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
