"""Label noise as a property of an experiment's data: some clients have wrong training labels.

The noise is that of FedCorr (Xu et al., CVPR 2022). Every client is noisy with one probability; a
noisy client draws its noise level, and each of its labels is replaced with this probability by a
label drawn from all classes. Everything follows from the seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Labels = NDArray[np.int64]
PURPOSE = zlib.crc32(b"label noise")  # keeps these draws apart from others with the same seed


class LabelNoise(BaseModel):
    """Which clients have wrong training labels, and how many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clients: float = Field(
        default=0.6, ge=0, le=1, description="probability that a client is noisy (FedCorr's rho)"
    )
    lowest: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="lowest noise level of a noisy client; the highest is 1 (FedCorr's tau)",
    )


def noise_levels(noise: LabelNoise, clients: int, seed: int) -> NDArray[np.float64]:
    """Return each client's noise level: the share of its labels that is drawn again.

    A label that is drawn again may come out right. With C classes, the expected share of wrong
    labels is therefore (C - 1) / C times the level.
    """
    random = np.random.default_rng([seed, PURPOSE])
    noisy = random.random(clients) < noise.clients
    levels = noise.lowest + (1.0 - noise.lowest) * random.random(clients)
    return np.where(noisy, levels, 0.0)


def with_label_noise(
    labels: Sequence[Labels], classes: int, noise: LabelNoise, seed: int
) -> list[Labels]:
    """Return each client's labels with noise; the given arrays are not changed."""
    levels = noise_levels(noise, len(labels), seed)
    return [
        _drawn_again(own, level, classes, np.random.default_rng([seed, PURPOSE, client]))
        for client, (own, level) in enumerate(zip(labels, levels, strict=True))
    ]


def _drawn_again(labels: Labels, level: float, classes: int, random: np.random.Generator) -> Labels:
    chosen = random.random(len(labels)) < level
    return np.where(chosen, random.integers(0, classes, len(labels)), labels)
