"""Update admission: which of a round's updates count, and for how much, before a rule sees any of them.

Pure functions of inner products, reports and facts that are durable, so that a server that was restarted and the lab's
simulation decide the same. Everybody is measured by the *others*: by their median, and by their median absolute
deviation from it. What an honest minority looks like is the reason for every exception below: a high loss is only out
of the ordinary if the fleet, the client's own past and an untrained model all speak against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Vector = NDArray[np.float64]
Check = Literal["norm", "loss", "samples"]
Decision = Literal["observed", "clipped", "winsorised", "capped", "rejected"]

FEWEST = 3  # updates of a round that is judged: of two that differ nobody can say which is the odd one
RECENT = 5  # losses of a client that are its recent past
FEWEST_RECENT = 3  # fewer are no past to be measured by
NORMAL = 1.4826  # median absolute deviations are so many times smaller than standard deviations of a normal
LEAST_SPREAD = 0.1  # of the median: losses that agree better than this are not told apart


class Admission(BaseModel):
    """What is done about updates that are out of the ordinary; see docs/security.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    norm: Literal["off", "observe", "clip", "reject"] = Field(
        default="observe", description="of an update longer than norm_factor times the median of the others"
    )
    norm_factor: float = Field(default=3.0, ge=1)
    loss: Literal["off", "observe", "winsorise", "reject"] = Field(
        default="observe", description="of a loss far above those of the others, its own past and an untrained model's"
    )
    loss_deviations: float = Field(default=5.0, gt=0, description="how many deviations from a median are far")
    samples: Literal["off", "observe", "cap"] = Field(
        default="observe", description="of a number of samples above samples_factor times the median of the others"
    )
    samples_factor: float = Field(default=10.0, ge=1)
    max_samples: PositiveInt | None = Field(default=None, description="more than this is too many, whatever others say")

    @property
    def is_off(self) -> bool:
        return self.norm == self.loss == self.samples == "off"

    @property
    def acts(self) -> bool:
        """Whether it may change what an update counts for, and not only tell of it."""
        return not {self.norm, self.loss, self.samples} <= {"off", "observe"}

    @property
    def milder(self) -> Admission:
        """Bounds where this one rejects."""
        milder = {"norm": {"reject": "clip"}.get(self.norm), "loss": {"reject": "winsorise"}.get(self.loss)}
        return self.model_copy(update={check: mode for check, mode in milder.items() if mode})


OFF = Admission(norm="off", loss="off", samples="off")


class Watched:
    """The losses that clients have reported, so far as admission asks for them."""

    def __init__(self, start: Sequence[float] = (), recent: Mapping[str, Sequence[float]] | None = None) -> None:
        self.start = float(np.median(start)) if start else None  # of the first round
        self._recent = {client: tuple(losses) for client, losses in (recent or {}).items()}

    def recent(self, client: str) -> tuple[float, ...]:
        return self._recent.get(client, ())

    def committed(self, losses: Mapping[str, float]) -> None:
        """A round's, of all its updates: also of those that did not count."""
        if self.start is None and losses:
            self.start = float(np.median(list(losses.values())))
        for client, loss in losses.items():
            self._recent[client] = (*self.recent(client), loss)[-RECENT:]

    def dump(self) -> dict[str, Any]:
        return {"start": self.start, "recent": self._recent}

    @classmethod
    def load(cls, kept: Mapping[str, Any]) -> Watched:
        return cls([] if kept["start"] is None else [kept["start"]], kept["recent"])


@dataclass(frozen=True)
class Gate:
    """By what a round's updates are judged, beside each other."""

    settings: Admission = OFF
    watched: Watched = field(default_factory=Watched)


@dataclass(frozen=True)
class Claims:
    """What is to be judged: one value for each client."""

    clients: Sequence[str]
    norms: Vector
    losses: Vector
    samples: Vector
    recent: Sequence[Sequence[float]] = ()  # losses that each reported in its last rounds; none: not known

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True)
class Finding:
    """Something out of the ordinary, and what was done about it."""

    client: str
    check: Check
    decision: Decision  # observed: nothing was done
    value: float  # that the client sent
    limit: float  # that it is above
    stood_in: bool = False  # it is of a row that stands for an absent client


@dataclass(frozen=True)
class Judgement:
    """What of each claim is admitted, in the order of the claims."""

    factors: Vector  # by which updates are multiplied: 1 unless they are clipped
    losses: Vector
    samples: Vector
    rejected: NDArray[np.bool_]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Limits:
    """The largest values that pass, for each client."""

    norms: Vector
    losses: Vector
    usual: Vector  # losses: what one above its limit is taken for
    samples: Vector


def judge(claims: Claims, gate: Gate) -> Judgement:
    """The clients of a round, by each other.

    Where more than half of them would be rejected, the checks contradict each other: nobody is rejected then, and
    what is out of the ordinary is clipped and winsorised instead. So a round never ends for want of admitted updates.
    """
    settings = gate.settings
    limits = _limits(claims, gate)
    found = _apply(claims, limits, settings)
    if 2 * np.count_nonzero(found.rejected) > len(claims):
        found = _apply(claims, limits, settings.milder)
    return found


def judge_stand_ins(past: Claims, present: Claims, gate: Gate) -> Judgement:
    """Rows that stand for absent clients, by the clients of the round. They may come from rounds that judged nobody."""
    settings, many = gate.settings, len(past)
    if settings.is_off or len(present) < FEWEST:
        return _apply(past, _no_limits(many), settings)
    median = float(np.median(present.losses))
    fence = median + settings.loss_deviations * _spread(np.abs(present.losses - median), median)
    limits = Limits(
        np.full(many, _or_none(settings.norm_factor * float(np.median(present.norms)))),
        np.full(many, max(fence, _untrained(gate))),
        np.full(many, median),
        np.full(many, _most_samples(settings, float(np.median(present.samples)))),
    )
    found = _apply(past, limits, settings)
    return replace(found, findings=tuple(replace(one, stood_in=True) for one in found.findings))


def _limits(claims: Claims, gate: Gate) -> Limits:
    settings = gate.settings
    if settings.is_off or len(claims) < FEWEST:
        return _no_limits(len(claims), settings.max_samples)
    norms = settings.norm_factor * medians_of_others(claims.norms)
    losses, usual = _loss_limits(claims, gate)
    samples = [_most_samples(settings, median) for median in medians_of_others(claims.samples).tolist()]
    return Limits(np.where(norms > 0.0, norms, np.inf), losses, usual, np.array(samples))


def _no_limits(many: int, max_samples: int | None = None) -> Limits:
    none = np.full(many, np.inf)
    return Limits(none, none, none, np.full(many, max_samples or np.inf))


def _loss_limits(claims: Claims, gate: Gate) -> tuple[Vector, Vector]:
    """A loss passes if others have such losses; or if it is neither new for its client nor above an untrained model's.

    Without the last, its own past would vouch for a lie as soon as it was told a few times. One that does not pass is
    taken for the median of the others: at any higher value a rule that looks for the worst served would find the liar.
    """
    many = gate.settings.loss_deviations
    medians = medians_of_others(claims.losses)
    fences = medians + many * spreads_of_others(claims.losses, medians)
    own = [_own_limit(recent, many) for recent in claims.recent] or [np.inf] * len(claims)
    return np.maximum(fences, np.minimum(own, _untrained(gate))), medians


def _own_limit(recent: Sequence[float], many: float) -> float:
    if len(recent) < FEWEST_RECENT:
        return np.inf
    median = float(np.median(recent))
    return median + many * _spread(np.abs(np.array(recent) - median), median)


def _untrained(gate: Gate) -> float:
    """What the fleet's losses were when nothing had been learnt yet, and a little more."""
    start = gate.watched.start
    return -np.inf if start is None else start + gate.settings.loss_deviations * LEAST_SPREAD * abs(start)


def _spread(deviations: Vector, median: float) -> float:
    return max(NORMAL * float(np.median(deviations)), LEAST_SPREAD * abs(median))


def _most_samples(settings: Admission, median: float) -> float:
    return min(settings.max_samples or np.inf, _or_none(settings.samples_factor * median))


def _or_none(limit: float) -> float:
    """Others that have nothing are no measure for anybody."""
    return limit if limit > 0.0 else np.inf


def _apply(claims: Claims, limits: Limits, settings: Admission) -> Judgement:
    found: list[Finding] = []

    def beyond(check: Check, mode: str, done: Decision, values: Vector, most: Vector) -> NDArray[np.bool_]:
        """Whose value is too large, if anything is to be done about it."""
        over = values > most if mode != "off" else np.zeros(len(claims), bool)
        decision: Decision = "observed" if mode == "observe" else done
        for at in np.flatnonzero(over).tolist():
            found.append(Finding(claims.clients[at], check, decision, float(values[at]), float(most[at])))
        return over & (mode != "observe")

    done: Decision = "rejected" if settings.norm == "reject" else "clipped"
    long = beyond("norm", settings.norm, done, claims.norms, limits.norms)
    done = "rejected" if settings.loss == "reject" else "winsorised"
    high = beyond("loss", settings.loss, done, claims.losses, limits.losses)
    many = beyond("samples", settings.samples, "capped", claims.samples, limits.samples)
    rejected = (long & (settings.norm == "reject")) | (high & (settings.loss == "reject"))
    factors = np.divide(limits.norms, claims.norms, out=np.ones(len(claims)), where=long)
    factors[factors < np.finfo(np.float64).tiny] = 0.0  # so small a number has too few digits to keep to the limit
    return Judgement(
        factors,
        np.where(high, limits.usual, claims.losses),
        np.where(many, limits.samples, claims.samples),
        rejected,
        tuple(sorted(found, key=lambda one: one.client)),
    )


# ---- by the others -------------------------------------------------------------------------------


def medians_of_others(values: Vector) -> Vector:
    """For each value, the median of all but itself: nobody has a say in what it is measured by.

    >>> medians_of_others(np.array([1.0, 1000.0, 3.0, 2.0]))
    array([3., 2., 2., 3.])
    """
    order = np.argsort(values, kind="stable")
    ordered, rank = values[order], np.empty(len(values), np.intp)
    rank[order] = np.arange(len(values))
    high = (len(values) - 1) // 2
    low = high if len(values) % 2 == 0 else high - 1
    lower, upper = (ordered[at + (rank <= at)] for at in (low, high))
    return np.asarray(lower + (upper - lower) / 2)


def spreads_of_others(values: Vector, medians: Vector) -> Vector:
    """For each value, how far the others lie from their median, as a deviation; at least a share of that median."""
    out = np.empty(len(values))
    for median in np.unique(medians):  # at most three
        here = medians == median
        out[here] = NORMAL * medians_of_others(np.abs(values - median))[here]
    return np.maximum(out, LEAST_SPREAD * np.abs(medians))
