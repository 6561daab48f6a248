"""Weight operations: operations with a weight, and the gradients of their input, bias and weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Operands(NamedTuple):
    """The operands of an operation."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Operation(ABC):
    """An operation on an input, a weight and optionally a bias.

    Attributes:
        is_cast: whether autocast casts its arguments.
    """

    is_cast: ClassVar[bool] = True
    __slots__ = ()

    @abstractmethod
    def forward(self, given: Operands) -> Tensor:
        """Compute the output."""

    @abstractmethod
    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the input."""

    def for_bias(self, gradient: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of the bias."""
        return gradient.sum_to_size(shape)

    @abstractmethod
    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight. Outputs are linear in the weight, so only its shape and layout matter."""


class Linear(Operation):
    """`x @ weight.T + bias`."""

    __slots__ = ()

    def forward(self, given: Operands) -> Tensor:
        """Compute the output."""
        return functional.linear(*given)

    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the input."""
        return _of_left(gradient, given.x.shape, given.weight.t())

    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight."""
        return torch.mm(_rows(gradient).t(), _rows(given.x).conj())


@dataclass(frozen=True, slots=True)
class Product(Operation):
    """A matrix product with the broadcasting of matmul: `beta * bias + alpha * (x @ weight)`."""

    name: str  # the name of the torch function; only addmm and baddbmm have a bias
    is_left: bool  # whether the weight is the left factor
    alpha: float = 1
    beta: float = 1

    def forward(self, given: Operands) -> Tensor:
        """Compute the output."""
        x, weight, bias = given
        pair = (weight, x) if self.is_left else (x, weight)
        function = getattr(torch, self.name)
        made: Tensor
        if bias is None:
            made = function(*pair)
        else:
            made = function(bias, *pair, alpha=self.alpha, beta=self.beta)
        return made

    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the input."""
        gradient = _scaled(gradient, self.alpha)
        if self.is_left:
            return _of_right(gradient, given.weight, given.x.shape)
        return _of_left(gradient, given.x.shape, given.weight)

    def for_bias(self, gradient: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of the bias."""
        return _scaled(gradient.sum_to_size(shape), self.beta)

    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight."""
        gradient = _scaled(gradient, self.alpha)
        if self.is_left:
            return _of_left(gradient, given.weight.shape, given.x)
        return _of_right(gradient, given.x, given.weight.shape)


@dataclass(frozen=True, slots=True)
class Convolution(Operation):
    """A convolution or a transposed convolution of a batch."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    is_transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, given: Operands) -> Tensor:
        """Compute the output."""
        settings = (self.stride, self.padding, self.dilation, self.is_transposed, self.output_padding, self.groups)
        return torch.convolution(*given, *settings)  # type: ignore[arg-type]

    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the input."""
        return self._backward(gradient, given.x, given.weight, (True, False, False))[0]

    def for_bias(self, gradient: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of the bias."""
        return gradient.sum([0, *range(2, gradient.ndim)]).view(shape)

    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight."""
        return self._backward(gradient, given.x, given.weight.to(given.x.dtype), (False, True, False))[1]

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
        settings = (self.stride, self.padding, self.dilation, self.is_transposed, self.output_padding, self.groups)
        made: list[Tensor] = torch.ops.aten.convolution_backward(gradient, x, weight, None, *settings, wanted)
        return made


@dataclass(frozen=True, slots=True)
class Embedding(Operation):
    """Rows of the weight, by index."""

    is_cast: ClassVar[bool] = False
    padding_index: int
    is_scaled_by_count: bool

    def forward(self, given: Operands) -> Tensor:
        """Look up the rows."""
        return torch.embedding(given.weight, given.x, self.padding_index, self.is_scaled_by_count)

    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Raise: indices have no gradient."""
        raise NotImplementedError

    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight."""
        settings = (given.weight.shape[0], self.padding_index, self.is_scaled_by_count)
        made: Tensor = torch.ops.aten.embedding_dense_backward(gradient, given.x, *settings)
        return made


@dataclass(frozen=True, slots=True)
class GroupedProduct(Operation):
    """One matrix product per group of rows, as in a mixture of experts; `offsets` holds the end of each group."""

    is_cast: ClassVar[bool] = False
    offsets: Tensor

    def forward(self, given: Operands) -> Tensor:
        """Compute the output."""
        return self._product(given.x, given.weight)

    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the input."""
        return self._product(gradient.contiguous(), given.weight.transpose(-2, -1))

    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight, with the memory layout of the weight."""
        gradient = gradient.contiguous()
        if given.weight.stride(-1) == 1:
            return self._product(given.x.t(), gradient)
        return self._product(gradient.t(), given.x).transpose(-2, -1)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        made: Tensor = torch._grouped_mm(left, right, offs=self.offsets)
        return made


@dataclass(frozen=True, slots=True)
class Einsum(Operation):
    """An einsum of two factors. Each letter of a factor also occurs in the other factor or in the output."""

    x: str  # the letters of the input
    weight: str  # the letters of the weight
    output: str  # the letters of the output
    is_left: bool  # whether the weight is the left factor

    def forward(self, given: Operands) -> Tensor:
        """Compute the output."""
        if self.is_left:
            return torch.einsum(f"{self.weight},{self.x}->{self.output}", given.weight, given.x)
        return torch.einsum(f"{self.x},{self.weight}->{self.output}", given.x, given.weight)

    def for_input(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the input."""
        return torch.einsum(f"{self.output},{self.weight}->{self.x}", gradient, given.weight.conj())

    def for_weight(self, gradient: Tensor, given: Operands) -> Tensor:
        """Return the gradient of the weight."""
        return torch.einsum(f"{self.output},{self.x}->{self.weight}", gradient, given.x.conj())


def _rows(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor.flatten(end_dim=-2)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _of_left(gradient: Tensor, shape: torch.Size, right: Tensor) -> Tensor:
    """Return the gradient of the left factor: gradient @ right^H, summed over the broadcast dimensions."""
    if right.ndim == 1:
        gradient, right = gradient.unsqueeze(-1), right.unsqueeze(-1)
    if len(shape) == 1:
        gradient = gradient.unsqueeze(-2)
    if len(shape) <= 2 < gradient.ndim:  # one matrix for the whole batch: sum in the product, not after it
        dims = [*range(gradient.ndim - 2), gradient.ndim - 1]
        made: Tensor = torch.tensordot(gradient, right.conj(), dims=(dims, dims))
    elif right.ndim == 2 < gradient.ndim:
        made = torch.mm(_rows(gradient), right.mH).view(shape)
    else:
        made = torch.matmul(gradient, right.mH)
    return made.view(shape) if len(shape) == 1 else made.sum_to_size(shape)


def _of_right(gradient: Tensor, left: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of the right factor: left^H @ gradient, summed over the broadcast dimensions."""
    if len(shape) == 1:
        gradient = gradient.unsqueeze(-1)
    if left.ndim == 1:
        gradient, left = gradient.unsqueeze(-2), left.unsqueeze(0)
    if len(shape) <= 2 < gradient.ndim:  # one matrix for the whole batch: sum in the product, not after it
        made = torch.mm(_rows(left).mH, _rows(gradient))
    else:
        made = torch.matmul(left.mH, gradient)
    return made.view(shape) if len(shape) == 1 else made.sum_to_size(shape)
