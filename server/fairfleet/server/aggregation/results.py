"""What aggregation passes on: the admitted cohort, the direction, the step and the next model.

All of these are immutable records. `ServerState` is the only one that goes into the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fairfleet.server.aggregation.admission import AdmissionFinding
from fairfleet.server.aggregation.buffers import BufferRule
from fairfleet.server.aggregation.diagnostics import Diagnostics
from fairfleet.server.gram.blocks import Row
from fairfleet.server.rules import Cohort, Report, State, Step, StepTrials, Vector
from fairfleet.server.rules.optimizer_vectors import OptimizerState


@dataclass(frozen=True)
class ServerState:
    """Everything that outlives a round, apart from the model and the history.

    None stands for the state at the start of training.
    """

    rule: State | None = None
    optimizer: OptimizerState | None = None


@dataclass(frozen=True)
class AdmittedCohort:
    """The cohort as its rule sees it, and what admission found in the round."""

    cohort: Cohort
    # One factor per row, of clients first and of the history next. A clipped row is not copied:
    # its inner products and its coefficient are scaled.
    factors: Vector
    findings: tuple[AdmissionFinding, ...] = ()

    @property
    def reports(self) -> dict[str, Report]:
        """The reports of the clients whose updates count."""
        return dict(zip(self.cohort.clients, self.cohort.reports, strict=True))


@dataclass(frozen=True)
class Direction:
    """What the rule chose, before any optimizer."""

    vector: Row
    admitted: AdmittedCohort
    choice: Step
    diagnostics: Diagnostics
    is_finite: bool = False  # False: the values of the vector have not been checked

    @property
    def cohort(self) -> Cohort:
        """The cohort that the rule saw."""
        return self.admitted.cohort


@dataclass(frozen=True)
class AggregatedStep:
    """The step of a round, after the optimizer."""

    vector: Row  # to be subtracted from the model
    state: ServerState
    diagnostics: Diagnostics
    trials: StepTrials | None = None  # that the rule needs before the step is taken
    rate: float = 1.0  # length of the step over that of the direction, if there are trials
    # Reports of the clients whose updates count, as the rule saw them.
    reports: Mapping[str, Report] = field(default_factory=dict)
    findings: tuple[AdmissionFinding, ...] = ()
    # How the buffers of those clients are merged; None if no update counts.
    buffers: BufferRule | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a round on plain arrays."""

    model: Row
    step: Row  # model before minus model after
    state: ServerState
    diagnostics: Diagnostics
