"""The rule on numbers that can be checked by hand: `python -m unittest`."""

from __future__ import annotations

import unittest

import numpy as np
from pydantic import ValidationError

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.rules import Recipe, Report
from project_name import LossWeighted

UPDATES = {"ann": np.array([1.0, 0.0]), "bob": np.array([0.0, 1.0])}
REPORTS = {"ann": Report(samples=90, loss=1.0), "bob": Report(samples=10, loss=3.0)}


def next_model(power: float) -> list[float]:
    """Return the model after one round, beginning with zeros."""
    recipe = Recipe("project_name", LossWeighted(power=power))
    return aggregate(np.zeros(2), UPDATES, REPORTS, recipe).model.tolist()


class LossWeightedTest(unittest.TestCase):
    """Tests of one round with two clients."""

    def test_clients_count_in_proportion_to_their_losses(self) -> None:
        """The losses are 1 and 3, and the model moves against the updates."""
        assert next_model(power=1.0) == [-0.25, -0.75]

    def test_a_power_of_zero_is_the_plain_mean(self) -> None:
        """The number of samples does not matter."""
        assert next_model(power=0.0) == [-0.5, -0.5]

    def test_a_negative_power_is_refused(self) -> None:
        """It would serve the best client most."""
        with self.assertRaises(ValidationError):
            LossWeighted(power=-1.0)


if __name__ == "__main__":
    unittest.main()
