"""Architectures in plain torch: convolutional nets with long and short skips, mixers, a denoiser."""

from __future__ import annotations

import torch
from plain import WIDTH, Built
from registry import BATCH, model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def conv_block(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )


@model("plain")
def unet() -> Built:
    """Return a U-Net with long skips."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = [8, 16, 24, 32]
            self.down = nn.ModuleList(conv_block(a, b) for a, b in zip([3, *wide], wide, strict=False))
            self.middle = conv_block(32, 32)
            self.up = nn.ModuleList(
                nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in [(32, 32), (32, 24), (24, 16), (16, 8)]
            )
            self.merge = nn.ModuleList(conv_block(2 * a, a) for a in reversed(wide))
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            skips = []
            for block in self.down:
                x = block(x)
                skips.append(x)
                x = F.max_pool2d(x, 2)
            x = self.middle(x)
            for up, merge in zip(self.up, self.merge, strict=True):
                x = merge(torch.cat([up(x), skips.pop()], 1))
            return self.head(x)

    return UNet(), torch.randn(BATCH, 3, 32, 32)


class Bottleneck(nn.Module):
    """The block of ResNet with three convolutions."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@model("plain")
def resnet50() -> Built:
    """Return ResNet-50 as in torchvision, with an eighth of the width."""

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
            self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
            inside = 8
            for index, (width, count) in enumerate([(8, 3), (16, 4), (32, 6), (64, 3)]):
                blocks = []
                for i in range(count):
                    blocks.append(Bottleneck(inside, width, 2 if index and i == 0 else 1))
                    inside = 4 * width
                setattr(self, f"layer{index + 1}", nn.Sequential(*blocks))
            self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inside, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
            x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
            return self.fc(torch.flatten(self.avgpool(x), 1))

    return ResNet(), torch.randn(BATCH, 3, 64, 64)


@model("plain")
def cifar_cnn() -> Built:
    """Return the small CNN for CIFAR-10 of many tutorials, with its view(-1, …)."""

    class CNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1)
            self.pool = nn.MaxPool2d(2, 2)
            self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
            self.fc1 = nn.Linear(32 * 8 * 8, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(nn.functional.relu(self.conv1(x)))
            x = self.pool(nn.functional.relu(self.conv2(x)))
            x = x.view(-1, 32 * 8 * 8)
            x = nn.functional.relu(self.fc1(x))
            return self.fc2(x)

    return CNN(), torch.randn(BATCH, 3, 32, 32)


@model("plain")
def vgg() -> Built:
    """Return a VGG-like nn.Sequential with dropout."""
    layers: list[nn.Module] = []
    inside = 3
    for width in (8, 8, 16, 16, 32):
        layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        inside = width
    layers += [nn.Flatten(), nn.Linear(inside, 64), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(64, 10)]
    return nn.Sequential(*layers), torch.randn(BATCH, 3, 32, 32)


@model("plain")
def mixer() -> Built:
    """Return an MLP-mixer: one MLP over positions, one over channels."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.over_places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.over_channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.over_places(self.norm1(x).mT).mT
            return x + self.over_channels(self.norm2(x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, WIDTH, 8, 8)
            self.layers = nn.Sequential(*(Layer() for _ in range(6)))
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.patch(x).flatten(2).mT).mean(1))

    return Mixer(), torch.randn(BATCH, 3, 32, 32)


@model("plain")
def densenet() -> Built:
    """Return dense blocks: every layer reads all earlier ones."""

    class Dense(nn.Module):
        def __init__(self, inside: int, count: int, growth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(conv_block(inside + i * growth, growth) for i in range(count))

        def forward(self, x: Tensor) -> Tensor:
            features = [x]
            for layer in self.layers:
                features.append(layer(torch.cat(features, 1)))
            return torch.cat(features, 1)

    layers = [nn.Conv2d(3, 8, 3, padding=1), Dense(8, 4, 4), nn.Conv2d(24, 12, 1), nn.AvgPool2d(2), Dense(12, 4, 4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(28, 10)]
    return nn.Sequential(*layers, *head), torch.randn(BATCH, 3, 16, 16)


@model("plain")
def wavenet() -> Built:
    """Return gated dilated convolutions; all skips are summed at the end."""

    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.pad = dilation
            self.conv, self.out = nn.Conv1d(16, 32, 2, dilation=dilation), nn.Conv1d(16, 32, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = self.conv(F.pad(x, (self.pad, 0))).chunk(2, 1)
            rest, skip = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            return x + rest, skip

    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Conv1d(1, 16, 1)
            self.layers = nn.ModuleList(Layer(2 ** (i % 4)) for i in range(8))
            self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, 20, 1))

        def forward(self, x: Tensor) -> Tensor:
            x, skips = self.inside(x), 0
            for layer in self.layers:
                x, skip = layer(x)
                skips = skips + skip
            return self.head(skips)

    return WaveNet(), torch.randn(BATCH, 1, 50)


@model("plain")
def diffusion_unet() -> Built:
    """Return a denoiser: a time step as an integer tensor, conditioning in every block, attention in the middle."""

    class Res(nn.Module):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(4, inside), nn.Conv2d(inside, outside, 3, padding=1)
            self.time, self.skip = nn.Linear(WIDTH, outside), nn.Conv2d(inside, outside, 1)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None] + self.skip(x)

    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
            self.inside, self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), Res(8, 16), Res(16, 32)
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.up2, self.up1, self.head = Res(64, 16), Res(32, 8), nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            rates = torch.exp(-torch.arange(WIDTH // 2, dtype=x.dtype) / 4)
            angles = step[:, None].to(x.dtype) * rates
            time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
            a = self.down1(self.inside(x), time)
            b = self.down2(F.avg_pool2d(a, 2), time)
            flat = b.flatten(2).mT
            middle = b + self.attention(flat, flat, flat, need_weights=False)[0].mT.reshape(b.shape)
            x = F.interpolate(self.up2(torch.cat([middle, b], 1), time), scale_factor=2)
            return self.head(self.up1(torch.cat([x, a], 1), time))

    return Denoise(), (torch.randn(BATCH, 3, 16, 16), torch.randint(1000, (BATCH,)))
