"""What a run records about its labels: how many are wrong, and what the correction found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from fairfleet.lab.label_noise.noise import Labels


class LabelReport(BaseModel):
    """Figures per client, in the order of their names; empty where they are not known."""

    model_config = ConfigDict(frozen=True)

    wrong: tuple[float, ...] = ()  # share of wrong training labels, as given
    corrected: tuple[float, ...] = ()  # the same after the correction
    estimated: tuple[float, ...] = ()  # noise levels that the correction estimated
    noisy: tuple[int, ...] = ()  # indices of the clients that the correction found noisy

    @property
    def left(self) -> tuple[float, ...]:
        """Return the shares of wrong labels that the rounds are trained with."""
        return self.corrected or self.wrong


def wrong_shares(labels: Sequence[Labels], truth: Sequence[Labels]) -> tuple[float, ...]:
    """Return each client's share of wrong labels, rounded to five digits."""
    pairs = zip(labels, truth, strict=True)
    return tuple(
        round(float(np.mean(own != right)), 5) if len(own) else 0.0 for own, right in pairs
    )
