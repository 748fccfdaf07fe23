"""The task learns, and clients have different data: `python -m unittest`."""

from __future__ import annotations

import unittest

from fairfleet.client.task import Job
from fairfleet.common.training_plan import Plan
from task import task


class TorchTaskTest(unittest.TestCase):
    """Tests of one client, without a server."""

    def test_training_lowers_the_loss_and_raises_the_accuracy(self) -> None:
        """Train for twenty epochs."""
        client = task()
        model = client.initial_model().named()
        trained = client.train(model, Job(Plan(epochs=20, learning_rate=0.1)))
        before, after = client.evaluate(model), client.evaluate(trained.arrays)
        assert after.loss is not None
        assert before.loss is not None
        assert after.loss < before.loss / 2
        assert after.accuracy is not None
        assert after.accuracy > 0.8

    def test_every_client_has_samples_of_its_own(self) -> None:
        """No sample is used twice."""
        sizes = [task(str(client), "3") for client in range(3)]
        assert sum(each.train_samples + each.test_samples for each in sizes) == 1797


if __name__ == "__main__":
    unittest.main()
