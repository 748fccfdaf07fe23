"""The clients' losses on the initial model, for rules that divide by them.

As in a federation, a client whose first round is a later one measures its loss then, once.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairfleet.common.tensors import Model
from fairfleet.lab.simulation.model_average import copy_model
from fairfleet.lab.simulation.trainer import Trainer
from fairfleet.server.aggregation.participation import ParticipationBook
from fairfleet.server.rules import Rule


class InitialLosses:
    """Measures the losses that a rule needs; keeps a copy of the initial model only for that."""

    def __init__(self, rule: Rule, initial: Model) -> None:
        self._model = copy_model(initial) if rule.needs().initial_loss else None

    @property
    def are_needed(self) -> bool:
        """Whether the rule needs them."""
        return self._model is not None

    def measure(
        self,
        trainer: Trainer,
        participation: ParticipationBook,
        round_number: int,
        numbers: Mapping[str, int],
    ) -> dict[str, float]:
        """Return the losses of the clients, given with their numbers, that lack one."""
        lacking = [
            client for client in numbers if participation.lacks_initial_loss(client, round_number)
        ]
        if self._model is None or not lacking:
            return {}
        losses = trainer.losses(self._model, [numbers[client] for client in lacking])
        return dict(zip(lacking, losses, strict=True))
