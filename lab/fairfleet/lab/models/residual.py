"""ResNet-18 with group normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairfleet.lab.models.request import ModelRequest

GROUPS = 32  # Groups of a group normalisation, as its authors recommend.


def resnet18_gn(request: ModelRequest) -> nn.Module:
    """Build ResNet-18 for small images, with group instead of batch normalisation.

    Unlike the original, it has no pooling at the start.
    """
    stem = [
        nn.Conv2d(request.channels(), 64, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 64),
        nn.ReLU(),
    ]
    blocks = [
        ResidualBlock(before, after, stride)
        for before, after, stride in [
            (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
            (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
        ]
    ]  # fmt: skip
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, request.classes)
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
        )
        keeps_shape = before == after and stride == 1
        self.shortcut = nn.Identity() if keeps_shape else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(GROUPS, after)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions and the shortcut after a ReLU."""
        return torch.relu(self.body(x) + self.shortcut(x))
