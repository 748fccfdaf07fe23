"""Models without any structure of images or text: logistic regression and dense networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fairfleet.lab.models.request import ModelRequest, linear


def softmax(request: ModelRequest) -> nn.Module:
    """Build multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), *linear([_product(request.shape), request.classes]))


def mlp(request: ModelRequest) -> nn.Module:
    """Build fully connected layers, with hidden layers of the given sizes and ReLU."""
    sizes = [_product(request.shape), *request.numbers([200, 200]), request.classes]
    return nn.Sequential(nn.Flatten(), *linear(sizes))


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
