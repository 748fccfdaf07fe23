"""Keeps figures of clients from earlier rounds that some rules need besides a report."""

from __future__ import annotations

from collections.abc import Mapping

from fairfleet.server.rules import Report


class ParticipationBook:
    """First losses and participation counts by client, over all committed rounds."""

    def __init__(
        self,
        first_losses: Mapping[str, float] | None = None,
        participations: Mapping[str, int] | None = None,
    ) -> None:
        self.first_losses = dict(first_losses or {})
        self.participations = dict(participations or {})

    def report(
        self,
        client: str,
        *,
        samples: float,
        loss: float,
        steps: int,
        learning_rate: float,
        accuracy: float | None,
        gradient_norm: float | None,
    ) -> Report:
        """Return a client's report as rules see it; its participations include this round."""
        return Report(
            samples=samples,
            loss=loss,
            first_loss=self.first_losses.get(client, loss),
            accuracy=accuracy,
            participations=self.participations.get(client, 0) + 1,
            steps=steps,
            gradient_norm=gradient_norm,
            local_lr=learning_rate,
        )

    def committed(self, losses: Mapping[str, float]) -> None:
        """Count a committed round, given the losses that its clients reported."""
        for client, loss in losses.items():
            self.first_losses.setdefault(client, loss)
            self.participations[client] = self.participations.get(client, 0) + 1
