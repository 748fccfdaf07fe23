"""The input of a rule: the clients of one round, their inner products and their reports.

A cohort contains small arrays only: one value per client, or one per pair of clients. No rule
needs an update itself, so the cost of a rule does not depend on the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.gram import Gram
from fairfleet.server.rules.errors import RuleError, UnusableReport

Vector = NDArray[np.float64]
Indices = NDArray[np.intp]
Weighting = Literal["samples", "uniform"]
Absent = Literal["ignore", "history"]  # whether absent clients take part with their last rows


@dataclass(frozen=True)
class Report:
    """The values that a client reports with its update.

    A rule states in `Needs.reports` which of the optional values it needs. All losses and
    accuracies are measured on the client's training data.
    """

    samples: float  # number of training samples
    loss: float  # of the received model; with `losses.rule: after`, of the trained one
    # The loss on the initial model, or at the first participation (`Needs.initial_loss`).
    first_loss: float | None = None
    accuracy: float | None = None  # of the received model, between 0 and 1
    participations: float | None = None  # rounds with this client, including this one
    steps: float | None = None  # number of local training steps
    gradient_norm: float | None = None  # of the full local gradient at the received model
    local_lr: float | None = None  # the client's learning rate
    personal_accuracy: float | None = None  # of Ditto's personal model, between 0 and 1


@dataclass(frozen=True)
class PastRow:
    """The description of one row of the history: a client's update from an earlier round."""

    client: str
    round: int  # the round of the model on which the update was computed
    loss: float | None = None  # as reported with the update
    samples: float | None = None  # as reported with the update


@dataclass(frozen=True)
class Objectives:
    """The losses that a direction must lower: the round's clients, then absent clients.

    All arrays have one entry per objective.
    """

    gram: Vector  # inner products, (objectives, objectives)
    losses: Vector
    samples: Vector
    rows: Indices  # the index of each objective's row among all rows of the cohort
    names: Sequence[str]  # of the absent clients only

    def __len__(self) -> int:
        return len(self.losses)

    def weights(self, weighting: Weighting) -> Vector:
        """Return one weight per objective, by samples or uniform; they add up to one."""
        return shares(self.samples if weighting == "samples" else np.ones(len(self)))


@dataclass(frozen=True)
class Cohort:
    """The clients of one round in the order of their ids, then the usable rows of the history.

    `gram`, and the coefficients of a step, cover the rows of the clients first and those of the
    history after them. Raises RuleError if the lengths do not match.
    """

    gram: Gram
    clients: Sequence[str]
    reports: Sequence[Report]  # one per client
    round: int = 0
    history: Sequence[PastRow] = ()
    known_clients: int = 0  # clients in the history, including those with rows too old to use

    def __post_init__(self) -> None:
        """Check that there is one report per client, and one row per client and past row."""
        rows = len(self.clients) + len(self.history)
        if len(self.clients) != len(self.reports) or len(self.gram) != rows:
            raise RuleError(
                f"{len(self.clients)} clients with {len(self.reports)} reports and "
                f"{len(self.history)} history rows, but inner products of {len(self.gram)} rows; "
                "expected one report per client and one row for each"
            )

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def own(self) -> Gram:
        """The inner products of the round's clients, without the history."""
        return self.gram.of(slice(0, len(self)))

    @property
    def samples(self) -> Vector:
        """The number of training samples of each client."""
        return self.reported("samples")

    @property
    def losses(self) -> Vector:
        """The loss of the received model at each client."""
        return self.reported("loss")

    def reported(self, name: str) -> Vector:
        """Return one reported value per client, given the name of a field of `Report`.

        Raises UnusableReport, which names the clients, if some did not report it.
        """
        values = [getattr(report, name) for report in self.reports]
        if missing := [
            client for client, value in zip(self.clients, values, strict=True) if value is None
        ]:
            raise UnusableReport(
                f"this rule needs {name} from every client and {', '.join(missing[:5])} did not "
                "report it; request it in the training plan or choose a rule that does not need it",
                missing,
            )
        return np.array(values, dtype=np.float64)

    def weights(self, weighting: Weighting) -> Vector:
        """Return one weight per client, by samples or uniform; they add up to one."""
        return shares(self.samples if weighting == "samples" else np.ones(len(self)))

    def objectives(self, absent: Absent, rounds: int) -> Objectives:
        """Return the clients as objectives and, with `history`, the absent clients too.

        An absent client takes part with its last row, if that row is at most `rounds` rounds old
        and has a loss.
        """
        used = [
            index
            for index in self.absent()
            if absent == "history" and self.round - self.history[index].round <= rounds
        ]
        used = [index for index in used if self.history[index].loss is not None]
        past = [self.history[index] for index in used]
        rows = np.array([*range(len(self)), *(len(self) + index for index in used)], dtype=np.intp)
        return Objectives(
            gram=self.gram.of(rows).whole,
            losses=np.concatenate([self.losses, [row.loss for row in past]]),
            samples=np.concatenate([self.samples, [row.samples or 0.0 for row in past]]),
            rows=rows,
            names=[row.client for row in past],
        )

    def absent(self) -> list[int]:
        """Return the indices of the history rows whose clients do not take part in this round."""
        present = set(self.clients)
        return [index for index, row in enumerate(self.history) if row.client not in present]


def shares(amounts: Vector) -> Vector:
    """Return the amounts divided by their sum; raise RuleError if the sum is not positive."""
    total = float(amounts.sum())
    if not 0.0 < total < np.inf:
        raise RuleError(
            f"the samples that clients reported add up to {total}, so they give no weights; "
            "expected at least one client with samples. Have clients report how many samples they "
            "trained on, or choose weighting=uniform"
        )
    return np.asarray(amounts / total)
