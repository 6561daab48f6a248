"""Small GPT: the default model of `penstock train` and the demo, in plain torch, and its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn


def make_gpt(num_characters: int, *, width: int = 128, depth: int = 4, heads: int = 4, length: int = 32) -> nn.Module:
    """Return a GPT that takes `(batch, length)` characters as numbers and predicts the next one for each."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
            query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.project(seen.transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]  # modules return anything

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters, self.places = nn.Embedding(num_characters, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_characters)

        def forward(self, x: Tensor) -> Tensor:
            x = self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    return GPT()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of the next characters, in nats per character."""
    from torch.nn import functional

    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Text:
    """A text with its characters as numbers.

    >>> text = Text("abcab")
    >>> text.numbers.tolist(), text.write([2, 0])
    ([0, 1, 2, 0, 1], 'ca')
    """

    content: str

    @cached_property
    def characters(self) -> str:
        """The distinct characters, sorted."""
        return "".join(sorted(set(self.content)))

    @cached_property
    def numbers(self) -> Tensor:
        """The whole text as numbers."""
        return self.read(self.content)

    def read(self, text: str) -> Tensor:
        """Return text as numbers."""
        import torch

        number_of = {character: number for number, character in enumerate(self.characters)}
        return torch.tensor([number_of[character] for character in text])

    def write(self, numbers: list[int]) -> str:
        """Return numbers as text."""
        return "".join(self.characters[number] for number in numbers)

    def batch(self, size: int, length: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return random pieces of the text, and the next character for each of their characters."""
        import torch

        starts = torch.randint(len(self.content) - length, (size, 1), generator=generator)
        pieces = self.numbers[starts + torch.arange(length + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def write_on(self, forward: Callable[[Tensor], Tensor], *, prompt: str, count: int, generator: Generator) -> str:
        """Return the characters that a model writes after a prompt, which must be as long as the model's input."""
        import torch

        numbers = self.read(prompt)
        for _ in range(count):
            scores = forward(numbers[None, -len(prompt) :])[0, -1].cpu()
            chances = torch.softmax(scores / 0.5, dim=-1)  # temperature 0.5 prefers likely characters
            numbers = torch.cat([numbers, torch.multinomial(chances, 1, generator=generator)])
        return self.write(numbers[len(prompt) :].tolist())


def load_text() -> Text:
    """Return the text of Penstock."""
    return Text((files("penstock") / "data" / "pipes.txt").read_text())
