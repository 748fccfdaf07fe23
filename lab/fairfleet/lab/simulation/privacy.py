"""Differential privacy in a simulation, by the clients' and the server's own functions.

The noise is seeded, so a run can be repeated. The accuracies of a simulation are the true ones;
epsilon is what a federation with the same settings would have spent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fairfleet.common.privacy import SeededNoise, blurred, protect
from fairfleet.common.tensors import Vector
from fairfleet.lab.simulation.trainer import TrainMeasures
from fairfleet.server.privacy import accountant
from fairfleet.server.privacy.accountant import PrivacySpent
from fairfleet.server.privacy.settings import PrivacySettings, ServerNoise
from fairfleet.server.rules import Recipe

UPDATE, REPORT, MEAN = range(3)  # The uses of noise; each has random numbers of its own.


@dataclass(frozen=True)
class SimulatedPrivacy:
    """The privacy settings of a simulated federation, and their noise."""

    settings: PrivacySettings
    recipe: Recipe
    cohort: int  # the divisor of a noised sum
    seed: int

    def send(self, row: Vector, received: Vector, client: int, round_number: int) -> None:
        """Protect an update in place, as a client does before the codec.

        The result is rounded as on a client, which computes the update from a trained model.
        """
        terms = self.settings.terms(self.recipe)
        if terms and terms.clip:
            protect(row, terms, self._noise(UPDATE, round_number, client))
            np.subtract(received, received - row, out=row)

    def report(self, measures: TrainMeasures, client: int, round_number: int) -> TrainMeasures:
        """Protect the values that a simulated client reports, as `protected_report` does."""
        terms = self.settings.report_terms("accuracy" in self.recipe.rule.needs().reports)
        if terms is None:
            return measures
        noise, scale = self._noise(REPORT, round_number, client), terms.noise_multiplier
        norm, after = measures.gradient_norm, measures.loss_after
        # The order of these calls is the order in which the noise is drawn.
        loss = blurred(measures.loss, terms.loss_bound, scale, noise)
        accuracy = blurred(measures.accuracy, 1.0, scale, noise) if terms.accuracy else 0.0
        return TrainMeasures(
            loss=loss,
            accuracy=accuracy,
            gradient_norm=None
            if norm is None
            else blurred(norm, terms.gradient_bound, scale, noise),
            steps=measures.steps,
            loss_after=None if after is None else loss,
            initial_loss=None
            if measures.initial_loss is None
            else blurred(measures.initial_loss, terms.loss_bound, scale, noise),
        )

    @property
    def hides_samples(self) -> bool:
        """Whether clients do not report their number of samples."""
        return self.settings.reports == "noised"

    def server_noise(self, round_number: int) -> ServerNoise | None:
        """Return the server's noise for a round; None if the clients add the noise."""
        return self.settings.server_noise(self.cohort, self._noise(MEAN, round_number))

    def epsilon(
        self,
        participations: Mapping[str, int],
        selections: Iterable[tuple[int, int]],
        evaluations: int,
    ) -> float:
        """Return the epsilon spent so far.

        `selections` has, for each round, how many clients were selected and among how many.
        `evaluations` is the number of evaluations that each client answered.
        """
        privacy, selections = self.settings, list(selections)
        sampled = [
            (selected, among)
            for selected, among in selections
            if privacy.amplification and selected < among
        ]
        certain = privacy.released_cost(self.recipe) + (0.0 if sampled else privacy.commit_cost)
        most = max(participations.values(), default=0)
        once = privacy.initial_loss_cost(self.recipe)
        spent = PrivacySpent(
            (most * certain + once if most else 0.0) + evaluations * privacy.evaluation_cost
        )
        for selected, among in sampled:
            spent = spent.plus(draw=privacy.draw(selected, among))
        return accountant.epsilon(spent, privacy.delta)

    def _noise(self, *purpose: int) -> SeededNoise:
        return SeededNoise(self.seed, *purpose)
