"""Models as nn.Sequential with one child per layer or block, the form that the balancing of torchgpipe needs."""

import torch
from torch import nn

Model = tuple[nn.Sequential, torch.Tensor]  # the model and its input
Tensors = tuple[torch.Tensor, ...]


def vgg16() -> Model:
    """Return VGG-16 with batch norm, with one child per layer; 64 × 64 images."""
    layers, width = [], 3
    for size in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not size:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU()]
        width = size
    layers += [nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers), torch.randn(4, 3, 64, 64)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        norm = nn.BatchNorm2d
        self.body = nn.Sequential(
            *(nn.Conv2d(width, inner, 1, bias=False), norm(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), norm(inner), nn.ReLU()),
            *(nn.Conv2d(inner, 4 * inner, 1, bias=False), norm(4 * inner)),
        )
        same = width == 4 * inner and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(width, 4 * inner, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet50() -> Model:
    """Return ResNet-50 as a sequence of blocks; 96 × 96 images."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(width, inner, stride if number == 0 else 1))
            width = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers), torch.randn(2, 3, 96, 96)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def gpt(vocabulary: int = 16_000, width: int = 256, blocks: int = 16) -> Model:
    """Return a GPT: embedding, blocks, norm, and a head that takes as long as several blocks."""
    layers = [nn.Embedding(vocabulary, width), *(Block(width, 4) for _ in range(blocks))]
    layers += [nn.LayerNorm(width), nn.Linear(width, vocabulary)]
    return nn.Sequential(*layers), torch.randint(vocabulary, (2, 128))


class Down(nn.Module):
    """A step down of a U-Net. Skip values travel in the tuple, as in the first models of torchgpipe itself."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, size, 3, padding=1), nn.ReLU(), nn.Conv2d(size, size, 3, padding=1))

    def forward(self, values: torch.Tensor | Tensors) -> Tensors:
        x, *skips = values if isinstance(values, tuple) else (values,)
        x = torch.relu(self.body(x))
        return (nn.functional.max_pool2d(x, 2), x, *skips)


class Up(nn.Module):
    """A step up of a U-Net. It takes the newest skip value from the tuple."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, size, 3, padding=1), nn.ReLU(), nn.Conv2d(size, size, 3, padding=1))

    def forward(self, values: torch.Tensor | Tensors) -> Tensors:
        x, skip, *skips = values
        x = torch.relu(self.body(torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], dim=1)))
        return (x, *skips)


def unet() -> Model:
    """Return a U-Net with five steps down and five up; 64 × 64 images."""
    sizes = (32, 48, 64, 96, 128)
    downs = [Down(a, b) for a, b in zip((3, *sizes), sizes, strict=False)]
    ups = [Up(a + b, b) for a, b in zip((sizes[-1], *sizes[::-1]), sizes[::-1], strict=False)]
    return nn.Sequential(*downs, *ups), torch.randn(2, 3, 64, 64)


MODELS = {"vgg16": vgg16, "resnet50": resnet50, "gpt": gpt, "unet": unet}
