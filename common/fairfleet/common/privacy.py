"""Clipping and Gaussian noise: what keeps an update, or a reported number, from telling much about one client.

Pure functions of arrays and a source of noise. A client takes its noise from the operating system's secure generator,
byte by byte; only a simulation seeds it. Nothing is derived from a plan's seed, which the server knows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, model_validator

from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Model, Vector

BLOCK = 1 << 16  # elements worked on at once
GRID_BITS = 20  # noised values are multiples of about a millionth of the noise


class Noise(Protocol):
    def normal(self, count: int) -> NDArray[np.float64]:
        """So many independent values with mean 0 and standard deviation 1."""


class SystemNoise:
    """Box-Muller on bytes of the operating system: no state that could be kept, repeated or guessed."""

    def normal(self, count: int) -> NDArray[np.float64]:
        pairs = (count + 1) // 2
        bits = np.frombuffer(os.urandom(16 * pairs), "<u8") >> 11  # as many as a float64 holds
        radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * 2.0**-53))  # the logarithm's argument is never 0
        angle = 2.0 * np.pi * 2.0**-53 * bits[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


class SeededNoise:
    """The same every time: for simulations, where nobody is to be protected."""

    def __init__(self, *seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def normal(self, count: int) -> NDArray[np.float64]:
        return self._generator.standard_normal(count)


class ReportTerms(BaseModel):
    """How numbers beside an update are protected: kept between 0 and a bound, with noise in proportion to it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    noise_multiplier: PositiveFloat
    loss_bound: PositiveFloat
    gradient_bound: PositiveFloat
    accuracy: bool = False  # of training is reported too: the rule needs it


class Terms(BaseModel):
    """What a client does to its result before anything leaves it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    clip: NonNegativeFloat = 0.0  # of the update's norm; 0: the update stays as it is
    noise_multiplier: NonNegativeFloat = 0.0  # standard deviation per parameter, in units of clip
    reports: ReportTerms | None = None

    @model_validator(mode="after")
    def _sense(self) -> Terms:
        if self.noise_multiplier and not self.clip:  # else whoever looks at the multiplier alone is deceived
            raise ValueError("noise in units of a clip of 0 is none")
        return self


NO_TERMS = Terms()


def shortfall(made: Terms, wanted: Terms) -> str | None:
    """In what a result had less done to it than is wanted; None: it had as much done to it, or more."""
    if wanted.clip and not 0 < made.clip <= wanted.clip:
        return f"was {f'clipped to {made.clip:g}' if made.clip else 'not clipped'}, not to {wanted.clip:g}"
    if made.noise_multiplier < wanted.noise_multiplier:
        return f"has noise of {made.noise_multiplier:g} times its clip, not {wanted.noise_multiplier:g}"
    return _report_shortfall(made.reports, wanted.reports) if wanted.reports else None


def _report_shortfall(made: ReportTerms | None, wanted: ReportTerms) -> str | None:
    if made is None:
        return "was reported without noise"
    if made.noise_multiplier < wanted.noise_multiplier:
        return f"was reported with noise of {made.noise_multiplier:g} times each bound, not {wanted.noise_multiplier:g}"
    if made.loss_bound > wanted.loss_bound or made.gradient_bound > wanted.gradient_bound:
        found, bounds = (f"{terms.loss_bound:g} and {terms.gradient_bound:g}" for terms in (made, wanted))
        return f"was reported with bounds of {found} for loss and gradient norm, not {bounds}"
    return None


def norm(values: Vector) -> float:
    """In float64, whatever the length."""
    return math.sqrt(sum(float(np.dot(part, part)) for part in (block.astype(np.float64) for block in _blocks(values))))


def clip(values: Vector, bound: float) -> float:
    """Shortens the vector in place to at most `bound`, float32 rounding included; how long it was."""
    before = length = norm(values)
    if not math.isfinite(before):
        raise ValueError("a vector with values that are not finite has no norm to be clipped")
    room, margin = 1.0, 1e-6
    while length > bound:
        np.multiply(values, np.float32(room * bound / length), out=values)
        length = norm(values)
        room, margin = max(room - margin, 0.0), 8 * margin  # rounding may leave it a trifle too long; this ends, at 0
    return before


def add_noise(values: Vector, deviation: float, noise: Noise) -> None:
    """In place: Gaussian noise in float64, then onto a grid.

    The grid hides in which bits the floating-point noise is not quite Gaussian (Mironov 2012).
    """
    if deviation == 0.0:
        return
    grid = 2.0 ** (math.floor(math.log2(deviation)) - GRID_BITS)
    for block in _blocks(values):
        block[:] = np.rint((block + deviation * noise.normal(len(block))) / grid) * grid


def protect_update(received: Model, trained: Model, terms: Terms, noise: Noise) -> None:
    """Replaces the trained parameters, in place, by those that differ from the received ones by a protected update.

    Whatever is made of them (update, codec, residual) is then computed from the protected update alone.
    """
    if not terms.clip:
        return
    update = np.subtract(received.parameters, trained.parameters, out=trained.parameters)
    protect(update, terms, noise)
    np.subtract(received.parameters, update, out=trained.parameters)


def protect(update: Vector, terms: Terms, noise: Noise) -> None:
    """Clips an update and adds the noise, in place."""
    clip(update, terms.clip)
    add_noise(update, terms.noise_multiplier * terms.clip, noise)


def blurred(value: float, bound: float, multiplier: float, noise: Noise) -> float:
    """A number between 0 and `bound`, with noise, and again between them: what rules and reports can take."""
    inside = min(max(value, 0.0), bound)
    return float(min(max(inside + multiplier * bound * float(noise.normal(1)[0]), 0.0), bound))


def protected_report(report: TrainReport, plan: Plan, terms: ReportTerms, noise: Noise) -> TrainReport:
    """What a rule may need, noised; what the plan says already; and nothing else: no count of samples, no time."""
    loss = blurred(report.loss_before, terms.loss_bound, terms.noise_multiplier, noise)
    gradient, accuracy = report.gradient_norm, report.accuracy
    return TrainReport(
        samples=1,
        loss_before=loss,
        loss_after=loss,
        steps=plan.steps or 1,
        learning_rate=plan.learning_rate,
        gradient_norm=None
        if gradient is None
        else blurred(gradient, terms.gradient_bound, terms.noise_multiplier, noise),
        accuracy=blurred(accuracy, 1.0, terms.noise_multiplier, noise)
        if terms.accuracy and accuracy is not None
        else None,
    )


def protected_evaluation(evaluation: Evaluation, terms: ReportTerms, noise: Noise) -> Evaluation:
    """Loss and accuracy of the federation's model, noised. A personal model is nobody's business then."""
    known = evaluation.accuracy
    return Evaluation(
        samples=1,
        loss=blurred(evaluation.loss, terms.loss_bound, terms.noise_multiplier, noise),
        accuracy=None if known is None else blurred(known, 1.0, terms.noise_multiplier, noise),
    )


def _blocks(values: Vector) -> Iterator[Vector]:
    for first in range(0, len(values), BLOCK):
        yield values[first : first + BLOCK]
