"""What a model is built for, and the parts that several models have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from fairfleet.common.errors import UsageError

IMAGE_AXES = 3


class ModelRequest(NamedTuple):
    """The description of the model to build."""

    name: str
    parameter: str | None  # The text after the colon in the name.
    shape: tuple[int, ...]  # The shape of one sample.
    classes: int

    def numbers(self, default: list[int]) -> list[int]:
        """Return the numbers after the colon, or `default`. Raises UsageError if one is below 1."""
        if self.parameter is None:
            return default
        parts = self.parameter.split(",")
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in parts]
        if min(numbers) < 1:
            raise UsageError(
                f"{self.name} takes whole numbers from 1, as in {self.name}:200,200 "
                f"(found {self.parameter!r})"
            )
        return numbers

    def channels(self) -> int:
        """Return the number of channels. Raises UsageError if the samples are not images."""
        if len(self.shape) != IMAGE_AXES:
            raise UsageError(
                f"{self.name} takes images of channels x height x width, "
                f"not samples of shape {self.shape}"
            )
        return self.shape[0]


def linear(sizes: Sequence[int]) -> list[nn.Module]:
    """Return linear layers from each size to the next, with a ReLU between two layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


def convolution(before: int, after: int, size: int, padding: int = 0) -> list[nn.Module]:
    """Return a convolution without padding by default, a ReLU and a pooling by two."""
    return [nn.Conv2d(before, after, size, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def classifier(
    request: ModelRequest,
    encoder: Sequence[nn.Module],
    hidden: Sequence[int],
    dropout: float = 0.0,
) -> nn.Module:
    """Return the encoder followed by linear layers on its features.

    With `dropout`, that share of the last hidden layer's values is dropped in training.
    """
    try:
        with torch.no_grad():
            features = nn.Sequential(*encoder)(torch.zeros(1, *request.shape)).numel()
    except RuntimeError as error:
        raise UsageError(
            f"images of {request.shape} are too small for {request.name}: {error}"
        ) from error
    layers = linear([features, *hidden, request.classes])
    if dropout:
        layers.insert(-1, nn.Dropout(dropout))
    return nn.Sequential(*encoder, nn.Flatten(), *layers)
