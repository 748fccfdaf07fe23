"""The task learns, and its gradient is that of its loss: `python -m unittest`."""

from __future__ import annotations

import unittest

import numpy as np

from fairfleet.client.task import Job
from fairfleet.common.training_plan import Plan
from task import CLASSES, loss_and_gradient, task


class NumpyTaskTest(unittest.TestCase):
    """Tests of one client, without a server."""

    def test_training_lowers_the_loss_and_raises_the_accuracy(self) -> None:
        """Train for ten epochs."""
        client = task()
        model = client.initial_model().named()
        trained = client.train(model, Job(Plan(epochs=10, learning_rate=0.1)))
        before, after = client.evaluate(model), client.evaluate(trained.arrays)
        assert after.loss is not None
        assert before.loss is not None
        assert after.loss < before.loss / 2
        assert after.accuracy is not None
        assert after.accuracy > 0.8
        assert abs(trained.report.loss_before - np.log(CLASSES)) < 1e-6  # all classes equal

    def test_the_gradient_is_that_of_the_loss(self) -> None:
        """Compare it with a difference quotient."""
        random = np.random.default_rng(0)
        x, y = random.normal(size=(7, 3)), random.integers(0, CLASSES, 7)
        weight, bias = random.normal(size=(3, CLASSES)), random.normal(size=CLASSES)
        direction = random.normal(size=weight.shape)
        _, by_weight, _ = loss_and_gradient(weight, bias, x, y)
        ahead, behind = (
            loss_and_gradient(weight + step * direction, bias, x, y)[0] for step in (1e-5, -1e-5)
        )
        assert abs((ahead - behind) / 2e-5 - (by_weight * direction).sum()) < 1e-6

    def test_every_client_has_samples_of_its_own(self) -> None:
        """No sample is used twice."""
        sizes = [task(str(client), "3") for client in range(3)]
        assert sum(each.train_samples + each.test_samples for each in sizes) == 1797


if __name__ == "__main__":
    unittest.main()
