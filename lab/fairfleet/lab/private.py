"""Differential privacy in a simulation: the clients' and the server's own functions, with noise that a seed repeats.

The figures that a simulation shows are the true ones; epsilon is what a federation so set would have spent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fairfleet.common.privacy import SeededNoise, blurred, protect
from fairfleet.common.tensors import Vector
from fairfleet.lab.cohort import Measured
from fairfleet.server import accounting
from fairfleet.server.accounting import Spent
from fairfleet.server.privacy import Disguised, PrivacySettings
from fairfleet.server.rules import Recipe

UPDATE, REPORT, MEAN = range(3)  # what noise is for: no two draw the same


@dataclass(frozen=True)
class Private:
    settings: PrivacySettings
    recipe: Recipe
    cohort: int  # what a noised sum is divided by
    seed: int

    def send(self, row: Vector, received: Vector, client: int, round_number: int) -> None:
        """What a client does to its update before the codec, in place; rounded as there, by way of a trained model."""
        terms = self.settings.terms(self.recipe)
        if terms and terms.clip:
            protect(row, terms, self._noise(UPDATE, round_number, client))
            np.subtract(received, received - row, out=row)

    def report(self, measured: Measured, client: int, round_number: int) -> Measured:
        """As `protected_report`, of the values that a simulated client reports."""
        terms = self.settings.report_terms("accuracy" in self.recipe.rule.needs().reports)
        if terms is None:
            return measured
        noise, scale, norm = self._noise(REPORT, round_number, client), terms.noise_multiplier, measured.gradient_norm
        loss = blurred(measured.loss, terms.loss_bound, scale, noise)
        after = measured.loss_after
        return Measured(
            loss=loss,
            accuracy=blurred(measured.accuracy, 1.0, scale, noise) if terms.accuracy else 0.0,
            gradient_norm=None if norm is None else blurred(norm, terms.gradient_bound, scale, noise),
            steps=measured.steps,
            loss_after=None if after is None else loss,
        )

    @property
    def hides_samples(self) -> bool:
        return self.settings.reports == "noised"

    def disguised(self, round_number: int) -> Disguised | None:
        return self.settings.disguised(self.cohort, self._noise(MEAN, round_number))

    def epsilon(self, participations: Mapping[str, int], lots: Iterable[tuple[int, int]], evaluations: int) -> float:
        """After rounds in which so many were drawn among so many, and clients answered so often."""
        privacy, lots = self.settings, list(lots)
        drawn = [lot for lot in lots if privacy.amplification and lot[0] < lot[1]]
        certain = privacy.released_cost(self.recipe) + (0.0 if drawn else privacy.commit_cost)
        most = max(participations.values(), default=0)
        spent = Spent((most * certain if most else 0.0) + evaluations * privacy.evaluation_cost)
        for lot in drawn:
            spent = spent.plus(draw=privacy.draw(*lot))
        return accounting.epsilon(spent, privacy.delta)

    def _noise(self, *what: int) -> SeededNoise:
        return SeededNoise(self.seed, *what)
