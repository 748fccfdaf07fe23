"""The loss of a report that the rule receives: that before training, or that after it."""

from __future__ import annotations

from typing import Literal

from fairfleet.common.reports import TrainReport

LossOfRule = Literal["before", "after"]  # training: that of the received, or the trained model


def loss_for_rule(report: TrainReport, which: LossOfRule) -> float:
    """Return the loss before or after training; before, if that after was not measured.

    Reports of the round under way have the loss after training if the rule receives it. Reports of
    earlier rounds may be older than this choice.
    """
    after = report.loss_after if which == "after" else None
    return report.loss_before if after is None else after
