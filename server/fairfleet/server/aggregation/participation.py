"""Keeps figures of clients from earlier rounds that some rules need besides a report."""

from __future__ import annotations

from collections.abc import Mapping

from fairfleet.common.reports import TrainReport
from fairfleet.server.aggregation.rule_loss import LossOfRule, loss_for_rule
from fairfleet.server.rules import Report


class ParticipationBook:
    """First losses and participation counts by client, over all committed rounds.

    With `initial`, a first loss is that on the initial model. It is taken from the client's first
    round if that trains the initial model, else the client measures it once. Without `initial`, and
    of a client that cannot measure it, it is the loss of the received model in its first round.
    """

    def __init__(
        self,
        first_losses: Mapping[str, float] | None = None,
        participations: Mapping[str, int] | None = None,
        *,
        initial: bool = False,
    ) -> None:
        self.first_losses = dict(first_losses or {})
        self.participations = dict(participations or {})
        self.initial = initial

    def lacks_initial_loss(self, client: str, round_number: int) -> bool:
        """Return whether a client should measure its loss on the initial model in this round."""
        return self.initial and round_number > 0 and client not in self.first_losses

    def report(
        self,
        client: str,
        *,
        round_number: int,
        samples: float,
        loss: float,
        loss_before: float,
        steps: int,
        learning_rate: float,
        accuracy: float | None,
        gradient_norm: float | None,
        initial_loss: float | None = None,
    ) -> Report:
        """Return a client's report as rules see it; its participations include this round.

        `loss` is what the rule receives, `loss_before` that of the received model. `initial_loss`
        is that on the initial model, if the client measured it in this round; in round 0, that is
        `loss_before`.
        """
        measured = initial_loss if self.initial and round_number > 0 else None
        first = loss_before if measured is None else measured
        return Report(
            samples=samples,
            loss=loss,
            first_loss=self.first_losses.get(client, first),
            accuracy=accuracy,
            participations=self.participations.get(client, 0) + 1,
            steps=steps,
            gradient_norm=gradient_norm,
            local_lr=learning_rate,
        )

    def report_of(
        self,
        client: str,
        round_number: int,
        report: TrainReport,
        rule_loss: LossOfRule = "before",
    ) -> Report:
        """Return a network client's report as rules see it, with the loss that they receive."""
        return self.report(
            client,
            round_number=round_number,
            samples=report.samples,
            loss=loss_for_rule(report, rule_loss),
            loss_before=report.loss_before,
            steps=report.steps,
            learning_rate=report.learning_rate,
            accuracy=report.accuracy,
            gradient_norm=report.gradient_norm,
            initial_loss=report.initial_loss,
        )

    def committed(self, reports: Mapping[str, Report]) -> None:
        """Count a committed round, given the reports of its clients as `report` returned them."""
        for client, report in reports.items():
            if report.first_loss is not None:
                self.first_losses.setdefault(client, report.first_loss)
            self.participations[client] = self.participations.get(client, 0) + 1
