"""ResNet-50 in plain torch. The names are those of torchvision, so weights can be exchanged in both directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ResNet50"]


class Bottleneck(nn.Module):
    """Three convolutions with a skip connection around them."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet50(nn.Module):
    """He et al. 2015, with the stride in the middle convolution, as is common today."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = _layer(64, 64, 3, stride=1)
        self.layer2 = _layer(256, 128, 4, stride=2)
        self.layer3 = _layer(512, 256, 6, stride=2)
        self.layer4 = _layer(1024, 512, 3, stride=2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2048, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _layer(inside: int, width: int, count: int, *, stride: int) -> nn.Sequential:
    rest = (Bottleneck(4 * width, width, 1) for _ in range(count - 1))
    return nn.Sequential(Bottleneck(inside, width, stride), *rest)
