"""The networks of the image studies: a small CNN for digits, and the ResNets of the paper's tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class DigitsNet(nn.Sequential):
    """Two convolutions and a linear layer for 8x8 images: 6,138 parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, classes),
        )


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or the bottleneck of 1x1, 3x3, 1x1."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        if bottleneck:
            layers = [*_convolution(inputs, width, 1), nn.ReLU()]
            layers += [*_convolution(width, width, 3, stride), nn.ReLU()]
            layers += _convolution(width, outputs, 1)
        else:
            layers = [*_convolution(inputs, width, 3, stride), nn.ReLU(), *_convolution(width, outputs, 3)]
        self.residual = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """A stem, stages of blocks that halve the image and double the width, the mean, a linear layer.

    Args:
        classes: of the last layer.
        blocks: in each stage.
        width: of the first stage.
        bottleneck: which kind of block.
        large_images: the stem for ImageNet (7x7, stride 2, max pooling), else for CIFAR (3x3).
    """

    def __init__(self, classes: int, blocks: Sequence[int], width: int, bottleneck: bool, large_images: bool) -> None:
        if large_images:
            layers = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        else:
            layers = [*_convolution(3, width, 3), nn.ReLU()]
        inputs = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                block = Block(inputs, width << stage, 2 if stage and i == 0 else 1, bottleneck)
                inputs = (width << stage) * (4 if bottleneck else 1)
                layers.append(block)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


#: Name -> blocks, width of the first stage, bottleneck, stem for large images.
RESNETS = {
    "resnet20": ((3, 3, 3), 16, False, False),
    "resnet34": ((3, 4, 6, 3), 64, False, True),
    "resnet50": ((3, 4, 6, 3), 64, True, True),
}


def build(name: str, classes: int) -> nn.Module:
    """A network by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "digits":
        return DigitsNet(classes)
    if name not in RESNETS:
        raise ValueError(f"model={name!r} is not one of digits, {', '.join(RESNETS)}")
    return ResNet(classes, *RESNETS[name])
