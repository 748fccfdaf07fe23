"""ResNet-18 without normalisation (Brock, De, Smith, ICLR 2021).

Weights are standardised in each convolution, and every residual branch is scaled, so that signals
keep their variance at the start. FedLF uses such a network for CIFAR-100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfleet.lab.models.request import ModelRequest

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))  # restores the variance after a ReLU
ALPHA = 0.2  # scale of a residual branch
EPSILON = 1e-5


class StandardisedConvolution(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 / fan-in, times a learned gain."""

    def __init__(self, before: int, after: int, size: int, stride: int = 1) -> None:
        super().__init__(before, after, size, stride, padding=size // 2, bias=False)
        self.gain = nn.Parameter(torch.ones(after, 1, 1, 1))
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution with the standardised filters."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        deviation = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
        scale = self.weight[0].numel() ** -0.5
        weight = self.gain * scale * centred / (deviation + EPSILON)
        return functional.conv2d(x, weight, None, self.stride, self.padding)


class NormaliserFreeBlock(nn.Module):
    """x + alpha f(x / beta), with f of two 3 x 3 convolutions, each after a ReLU.

    The shortcut of a block that changes the shape is a convolution: of f's activated input, as its
    authors have it, or of x (`from_input`), as in FedLF's code.
    """

    def __init__(
        self, before: int, after: int, stride: int, beta: float, *, from_input: bool
    ) -> None:
        super().__init__()
        self.first = StandardisedConvolution(before, after, 3, stride)
        self.second = StandardisedConvolution(after, after, 3)
        keeps_shape = before == after and stride == 1
        self.shortcut = None if keeps_shape else StandardisedConvolution(before, after, 1, stride)
        self.beta, self.from_input = beta, from_input

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled residual branch plus the shortcut."""
        activated = RELU_GAIN * torch.relu(x) / self.beta
        branch = self.second(RELU_GAIN * torch.relu(self.first(activated)))
        if self.shortcut is not None:
            x = self.shortcut(x if self.from_input else activated)
        out: Tensor = x + ALPHA * branch
        return out


def nfresnet18(request: ModelRequest) -> nn.Module:
    """Build ResNet-18 without normalisation, with a 3 x 3 convolution at the start."""
    return nn.Sequential(
        StandardisedConvolution(request.channels(), 64, 3),
        *_stages((64, 128, 256, 512)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, request.classes),
    )


def nfresnet18_fedlf(request: ModelRequest) -> nn.Module:
    """Build the much smaller network that FedLF's code names NFResNet-18.

    It has three stages of 16, 32 and 64 channels, pooling at the start, and beta = 1 throughout.
    """
    return nn.Sequential(
        StandardisedConvolution(request.channels(), 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        *_stages((16, 32, 64), as_in_fedlf=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, request.classes),
    )


def _stages(widths: Sequence[int], *, as_in_fedlf: bool = False) -> list[nn.Module]:
    """Return two blocks per width; every stage but the first halves height and width.

    beta is the deviation of a block's input at the start: a block that keeps the shape adds alpha^2
    to the variance, and one that changes it starts again from 1 + alpha^2.
    """
    blocks: list[nn.Module] = []
    before, variance = 64, 1.0
    for stage, width in enumerate(widths):
        for stride in (1 if stage == 0 else 2, 1):
            beta = 1.0 if as_in_fedlf else math.sqrt(variance)
            blocks.append(NormaliserFreeBlock(before, width, stride, beta, from_input=as_in_fedlf))
            keeps_shape = before == width and stride == 1
            variance = (variance if keeps_shape else 1.0) + ALPHA**2
            before = width
    return blocks
