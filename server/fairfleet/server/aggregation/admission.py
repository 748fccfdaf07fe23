"""Admission of updates: decides which updates of a round count, and for how much.

It runs before any rule sees the updates. The decisions are pure functions of inner products,
reports and durable facts, so a restarted server and the simulation decide alike. Each client is
compared with the *others*: with their median and their median absolute deviation from it. The
exceptions protect honest minorities. A high loss counts as unusual only if it is far above the
losses of the fleet, and also above the client's own past losses or those of an untrained model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from fairfleet.server.aggregation.leave_one_out import (
    LEAST_SPREAD,
    Vector,
    medians_of_others,
    spread,
    spreads_of_others,
)

Check = Literal["norm", "loss", "samples", "buffers", "report", "aggregation"]
Decision = Literal["observed", "clipped", "winsorised", "capped", "rejected", "quarantined"]

MIN_UPDATES = 3  # in a round that is judged: of two that differ, either may be the unusual one
RECENT_LOSSES = 5  # of a client: its recent past
MIN_RECENT_LOSSES = 3  # with fewer, a client has no past to compare with


class AdmissionSettings(BaseModel):
    """What the server does about unusual updates; see docs/explanation/admission.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    norm: Literal["off", "observe", "clip", "reject"] = Field(
        default="observe",
        description="for an update longer than norm_factor times the median of the others",
    )
    norm_factor: float = Field(
        default=3.0, ge=1, description="how many times the others' median length is too long"
    )
    loss: Literal["off", "observe", "winsorise", "reject"] = Field(
        default="observe",
        description=(
            "for a loss far above those of the others, "
            "and above the client's own past or an untrained model's"
        ),
    )
    loss_deviations: float = Field(
        default=5.0, gt=0, description="distance from a median, in deviations, that counts as far"
    )
    samples: Literal["off", "observe", "cap"] = Field(
        default="observe",
        description="for a number of samples above samples_factor times the median of the others",
    )
    samples_factor: float = Field(
        default=10.0, ge=1, description="how many times the others' median number is too many"
    )
    max_samples: PositiveInt | None = Field(
        default=None, description="limit on samples that does not depend on other clients"
    )

    @field_validator("norm", "loss", "samples", mode="before")
    @classmethod
    def _off_in_yaml(cls, mode: Any) -> Any:
        return "off" if mode is False else mode  # YAML reads an unquoted off as false.

    @property
    def is_off(self) -> bool:
        """Whether nothing is checked."""
        return self.norm == self.loss == self.samples == "off"

    @property
    def acts(self) -> bool:
        """Whether it may change what an update counts for, besides reporting it."""
        return not {self.norm, self.loss, self.samples} <= {"off", "observe"}

    @property
    def milder(self) -> AdmissionSettings:
        """The same settings, which bound values where these reject."""
        milder = {
            "norm": {"reject": "clip"}.get(self.norm),
            "loss": {"reject": "winsorise"}.get(self.loss),
        }
        return self.model_copy(update={check: mode for check, mode in milder.items() if mode})


OFF = AdmissionSettings(norm="off", loss="off", samples="off")


class LossHistory:
    """The losses that clients have reported, as far as admission needs them."""

    def __init__(
        self, start: Sequence[float] = (), recent: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """`start` has the losses of the first round, `recent` the newest ones by client."""
        self.start = float(np.median(start)) if start else None  # the median of the first round
        self._recent = {client: tuple(losses) for client, losses in (recent or {}).items()}

    def recent(self, client: str) -> tuple[float, ...]:
        """Return the newest losses of a client, oldest first."""
        return self._recent.get(client, ())

    def committed(self, losses: Mapping[str, float]) -> None:
        """Add the losses of a committed round, also of updates that did not count."""
        if self.start is None and losses:
            self.start = float(np.median(list(losses.values())))
        for client, loss in losses.items():
            self._recent[client] = (*self.recent(client), loss)[-RECENT_LOSSES:]

    def dump(self) -> dict[str, Any]:
        """Return the history as plain values for `load`."""
        return {"start": self.start, "recent": self._recent}

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> LossHistory:
        """Return the history that `dump` gave."""
        return cls([] if values["start"] is None else [values["start"]], values["recent"])


@dataclass(frozen=True)
class AdmissionContext:
    """What a round's updates are compared with, apart from each other."""

    settings: AdmissionSettings = OFF
    losses: LossHistory = field(default_factory=LossHistory)


@dataclass(frozen=True)
class ReportedValues:
    """The values to judge: one of each kind per client."""

    clients: Sequence[str]
    norms: Vector
    losses: Vector
    samples: Vector
    # The losses that each client reported in its last rounds; empty if they are not available.
    recent: Sequence[Sequence[float]] = ()

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True)
class AdmissionFinding:
    """An unusual value, and what was done about it."""

    client: str
    check: Check
    decision: Decision  # observed: nothing was done
    value: float  # that the client sent
    limit: float  # that the value exceeds
    stood_in: bool = False  # the value belongs to a row that stands in for an absent client
    reason: str = ""  # in words, if there is no value and limit


@dataclass(frozen=True)
class AdmissionDecision:
    """What is admitted of each reported value, in the order of the clients."""

    factors: Vector  # by which updates are multiplied: 1 unless they are clipped
    losses: Vector
    samples: Vector
    rejected: NDArray[np.bool_]
    findings: tuple[AdmissionFinding, ...] = ()


@dataclass(frozen=True)
class AdmissionBounds:
    """The largest values that pass, for each client."""

    norms: Vector
    losses: Vector
    usual_losses: Vector  # what replaces a loss above its limit
    samples: Vector


def judge(values: ReportedValues, context: AdmissionContext) -> AdmissionDecision:
    """Judge the clients of a round, each by the others.

    If more than half of them would be rejected, the checks contradict each other. Then no update
    is rejected, and unusual values are clipped and winsorised instead. So a round always has
    admitted updates.
    """
    settings = context.settings
    bounds = _bounds(values, context)
    decision = _apply(values, bounds, settings)
    if 2 * np.count_nonzero(decision.rejected) > len(values):
        decision = _apply(values, bounds, settings.milder)
    return decision


def judge_stand_ins(
    past: ReportedValues, present: ReportedValues, context: AdmissionContext
) -> AdmissionDecision:
    """Judge rows that stand in for absent clients by the clients of the round.

    The rows may come from rounds in which no update was judged.
    """
    settings, count = context.settings, len(past)
    if settings.is_off or len(present) < MIN_UPDATES:
        return _apply(past, _no_bounds(count), settings)
    median = float(np.median(present.losses))
    fence = median + settings.loss_deviations * spread(np.abs(present.losses - median), median)
    bounds = AdmissionBounds(
        np.full(count, _positive_or_inf(settings.norm_factor * float(np.median(present.norms)))),
        np.full(count, max(fence, _untrained_limit(context))),
        np.full(count, median),
        np.full(count, _samples_limit(settings, float(np.median(present.samples)))),
    )
    decision = _apply(past, bounds, settings)
    findings = tuple(replace(finding, stood_in=True) for finding in decision.findings)
    return replace(decision, findings=findings)


def _bounds(values: ReportedValues, context: AdmissionContext) -> AdmissionBounds:
    settings = context.settings
    if settings.is_off or len(values) < MIN_UPDATES:
        return _no_bounds(len(values), settings.max_samples)
    norms = settings.norm_factor * medians_of_others(values.norms)
    losses, usual_losses = _loss_bounds(values, context)
    samples = [
        _samples_limit(settings, median) for median in medians_of_others(values.samples).tolist()
    ]
    return AdmissionBounds(
        np.where(norms > 0.0, norms, np.inf), losses, usual_losses, np.array(samples)
    )


def _no_bounds(count: int, max_samples: int | None = None) -> AdmissionBounds:
    unlimited = np.full(count, np.inf)
    return AdmissionBounds(unlimited, unlimited, unlimited, np.full(count, max_samples or np.inf))


def _loss_bounds(values: ReportedValues, context: AdmissionContext) -> tuple[Vector, Vector]:
    """Return the largest losses that pass, and what replaces a larger one.

    A loss passes if others have such losses. It also passes if it is neither unusual for its
    client nor above that of an untrained model. Without the second condition, a client's own past
    would justify a false loss as soon as it was reported a few times. A loss that does not pass is
    replaced by the median of the others: with any higher value, a rule that favours the worst
    served client would favour the one that reports falsely.
    """
    deviations = context.settings.loss_deviations
    medians = medians_of_others(values.losses)
    fences = medians + deviations * spreads_of_others(values.losses, medians)
    own = [_own_limit(recent, deviations) for recent in values.recent] or [np.inf] * len(values)
    return np.maximum(fences, np.minimum(own, _untrained_limit(context))), medians


def _own_limit(recent: Sequence[float], deviations: float) -> float:
    """Return the largest loss that is usual for a client with these recent losses."""
    if len(recent) < MIN_RECENT_LOSSES:
        return np.inf
    median = float(np.median(recent))
    return median + deviations * spread(np.abs(np.array(recent) - median), median)


def _untrained_limit(context: AdmissionContext) -> float:
    """Return a limit slightly above the fleet's losses before any training; -inf without them."""
    start = context.losses.start
    if start is None:
        return -np.inf
    return start + context.settings.loss_deviations * LEAST_SPREAD * abs(start)


def _samples_limit(settings: AdmissionSettings, median: float) -> float:
    limit = _positive_or_inf(settings.samples_factor * median)
    return min(settings.max_samples or np.inf, limit)


def _positive_or_inf(limit: float) -> float:
    """Return no limit if the others have nothing to compare with."""
    return limit if limit > 0.0 else np.inf


def _apply(
    values: ReportedValues, bounds: AdmissionBounds, settings: AdmissionSettings
) -> AdmissionDecision:
    """Apply the bounds as the settings say."""
    findings: list[AdmissionFinding] = []
    clips, winsorises = settings.norm != "reject", settings.loss != "reject"
    norm = _Comparison("norm", settings.norm, "clipped" if clips else "rejected")
    loss = _Comparison("loss", settings.loss, "winsorised" if winsorises else "rejected")
    samples = _Comparison("samples", settings.samples, "capped")
    long = norm.exceeding(values.clients, values.norms, bounds.norms, findings)
    high = loss.exceeding(values.clients, values.losses, bounds.losses, findings)
    many = samples.exceeding(values.clients, values.samples, bounds.samples, findings)
    factors = np.divide(bounds.norms, values.norms, out=np.ones(len(values)), where=long)
    # A subnormal factor has too few digits: the clipped update could exceed the limit.
    factors[factors < np.finfo(np.float64).tiny] = 0.0
    return AdmissionDecision(
        factors,
        np.where(high, bounds.usual_losses, values.losses),
        np.where(many, bounds.samples, values.samples),
        rejected=(long & (not clips)) | (high & (not winsorises)),
        findings=tuple(sorted(findings, key=lambda finding: finding.client)),
    )


@dataclass(frozen=True)
class _Comparison:
    """One check of reported values, with its mode and what it does about unusual ones."""

    check: Check
    mode: str
    action: Decision

    def exceeding(
        self,
        clients: Sequence[str],
        values: Vector,
        limits: Vector,
        findings: list[AdmissionFinding],
    ) -> NDArray[np.bool_]:
        """Append what is above its limit to the findings; return for whom the action is taken."""
        if self.mode == "off":
            return np.zeros(len(values), bool)
        above = values > limits
        decision: Decision = "observed" if self.mode == "observe" else self.action
        findings += [
            AdmissionFinding(
                clients[index], self.check, decision, float(values[index]), float(limits[index])
            )
            for index in np.flatnonzero(above).tolist()
        ]
        return above & (self.mode != "observe")
