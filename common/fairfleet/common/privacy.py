"""Clip updates and add Gaussian noise, so that they reveal little about one client.

These are pure functions of arrays and a source of noise. A client takes every byte of its noise
from the operating system's secure generator; only a simulation seeds it. Nothing is derived from
the seed of a plan, which the server knows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, model_validator

from fairfleet.common.errors import UsageError
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Model, Section, Signature, Vector
from fairfleet.common.training_plan import EXACTLY, EXACTNESS, LossPlan, Plan

BLOCK = 1 << 16  # elements processed at once
GRID_BITS = 20  # noised values are multiples of about a millionth of the noise


class Noise(Protocol):
    """A source of Gaussian noise."""

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return `count` independent values with mean 0 and standard deviation 1."""


class SystemNoise:
    """Noise from the operating system's random bytes, by the Box-Muller transform.

    It has no state that could be stored, repeated or guessed.
    """

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return `count` independent values with mean 0 and standard deviation 1."""
        pairs = (count + 1) // 2
        bits = np.frombuffer(os.urandom(16 * pairs), "<u8") >> 11  # the 53 bits of a float64
        # The addition of 1 keeps the argument of the logarithm above 0.
        radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * 2.0**-53))
        angle = 2.0 * np.pi * 2.0**-53 * bits[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


class SeededNoise:
    """Reproducible noise, for simulations, which have no client to protect."""

    def __init__(self, *seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return `count` independent values with mean 0 and standard deviation 1."""
        return self._generator.standard_normal(count)


class ReportTerms(BaseModel):
    """The protection of the numbers reported with an update.

    Each number is clipped to between 0 and a bound, and gets noise in proportion to the bound.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    noise_multiplier: PositiveFloat
    loss_bound: PositiveFloat
    gradient_bound: PositiveFloat
    accuracy: bool = (
        False  # whether the training accuracy is reported too, because the rule needs it
    )


class PrivacyTerms(BaseModel):
    """The protection that a client applies to its result before anything leaves the client."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    clip: NonNegativeFloat = 0.0  # bound on the update's norm; 0: the update is not changed
    noise_multiplier: NonNegativeFloat = 0.0  # standard deviation per parameter, in units of clip
    reports: ReportTerms | None = None

    @model_validator(mode="after")
    def _check_noise_has_clip(self) -> PrivacyTerms:
        # Otherwise code that looks only at the multiplier would believe that there is noise.
        if self.noise_multiplier and not self.clip:
            raise ValueError("noise in units of a clip of 0 is none; set clip above 0")
        return self


NO_TERMS = PrivacyTerms()


def shortfall(applied: PrivacyTerms, required: PrivacyTerms) -> str | None:
    """Describe in what a result was protected less than required.

    Returns None if it was protected as much as required, or more.
    """
    if required.clip and not 0 < applied.clip <= required.clip:
        clipping = f"clipped to {applied.clip:g}" if applied.clip else "not clipped"
        return f"was {clipping}, not to {required.clip:g}"
    if applied.noise_multiplier < required.noise_multiplier:
        return (
            f"has noise of {applied.noise_multiplier:g} times its clip, "
            f"not {required.noise_multiplier:g}"
        )
    return _report_shortfall(applied.reports, required.reports) if required.reports else None


def _report_shortfall(applied: ReportTerms | None, required: ReportTerms) -> str | None:
    if applied is None:
        return "was reported without noise"
    if applied.noise_multiplier < required.noise_multiplier:
        return (
            f"was reported with noise of {applied.noise_multiplier:g} times each bound, "
            f"not {required.noise_multiplier:g}"
        )
    if applied.loss_bound > required.loss_bound or applied.gradient_bound > required.gradient_bound:
        return (
            f"was reported with bounds of {_bounds(applied)} for loss and gradient norm, "
            f"not {_bounds(required)}"
        )
    return None


def _bounds(terms: ReportTerms) -> str:
    return f"{terms.loss_bound:g} and {terms.gradient_bound:g}"


def model_refusal(signature: Signature) -> str | None:
    """Return why a model cannot be trained with privacy; None if it can."""
    names = [
        tensor.name
        for section in (Section.BUFFERS, Section.COUNTERS)
        for tensor, _ in signature.spans(section)
    ]
    if not names:
        return None
    return (
        f"the model has buffers ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}), which "
        "are averaged without clipping or noise: privacy would not cover them. Use layers without "
        "running statistics, such as GroupNorm or LayerNorm instead of BatchNorm."
    )


def norm(values: Vector) -> float:
    """Return the Euclidean norm, computed in float64."""
    wide_blocks = (block.astype(np.float64) for block in _blocks(values))
    return math.sqrt(sum(float(np.dot(block, block)) for block in wide_blocks))


def clip(values: Vector, bound: float) -> float:
    """Shorten a vector in place to a norm of at most `bound`, and return its norm before.

    The bound holds exactly, rounding to float32 included. Raises ValueError if a value is not
    finite.
    """
    norm_before = length = norm(values)
    if not math.isfinite(norm_before):
        raise ValueError("a vector with values that are not finite has no norm to be clipped")
    factor, margin = 1.0, 1e-6
    while length > bound:
        np.multiply(values, np.float32(factor * bound / length), out=values)
        length = norm(values)
        # Rounding may leave the vector slightly too long. The factor reaches 0, so this ends.
        factor, margin = max(factor - margin, 0.0), 8 * margin
    return norm_before


def add_noise(values: Vector, deviation: float, noise: Noise) -> None:
    """Add Gaussian noise of a standard deviation in place, in float64, and round to a grid.

    The low bits of floating-point noise are not quite Gaussian; the grid hides them
    (Mironov 2012).
    """
    if deviation == 0.0:
        return
    grid = 2.0 ** (math.floor(math.log2(deviation)) - GRID_BITS)
    for block in _blocks(values):
        block[:] = np.rint((block + deviation * noise.normal(len(block))) / grid) * grid


def protect_update(received: Model, trained: Model, terms: PrivacyTerms, noise: Noise) -> None:
    """Replace the trained parameters in place, so that the update becomes a protected update.

    Everything derived from them later (update, encoding, residual) then depends on the protected
    update alone.
    """
    if not terms.clip:
        return
    update = np.subtract(received.parameters, trained.parameters, out=trained.parameters)
    protect(update, terms, noise)
    np.subtract(received.parameters, update, out=trained.parameters)


def protect(update: Vector, terms: PrivacyTerms, noise: Noise) -> None:
    """Clip an update and add the noise, in place."""
    clip(update, terms.clip)
    add_noise(update, terms.noise_multiplier * terms.clip, noise)


def blurred(value: float, bound: float, multiplier: float, noise: Noise) -> float:
    """Return a number with noise, clipped to between 0 and `bound` before and after.

    Rules and reports accept the result.
    """
    inside = min(max(value, 0.0), bound)
    return float(min(max(inside + multiplier * bound * float(noise.normal(1)[0]), 0.0), bound))


def protected_report(
    report: TrainReport,
    plan: Plan,
    terms: ReportTerms,
    noise: Noise,
    wanted: LossPlan = EXACTLY,
) -> TrainReport:
    """Return a report with only what the server may know.

    That is what a rule may need, with noise, and what the plan contains already. The number of
    samples, the duration, a loss after training and the error of a sampled loss are left out.
    """
    loss = blurred(report.loss_before, terms.loss_bound, terms.noise_multiplier, noise)
    gradient, accuracy, initial = report.gradient_norm, report.accuracy, report.initial_loss
    return TrainReport(
        samples=1,
        loss_before=loss,
        # Where there are few samples, a sample is all of them; but it was a sample that was wanted.
        loss_measurement=min(report.loss_measurement, wanted.before, key=EXACTNESS.index),
        steps=plan.steps or 1,
        learning_rate=plan.learning_rate,
        gradient_norm=None
        if gradient is None
        else blurred(gradient, terms.gradient_bound, terms.noise_multiplier, noise),
        accuracy=blurred(accuracy, 1.0, terms.noise_multiplier, noise)
        if terms.accuracy and accuracy is not None
        else None,
        initial_loss=None
        if initial is None
        else blurred(initial, terms.loss_bound, terms.noise_multiplier, noise),
    )


def protected_evaluation(evaluation: Evaluation, terms: ReportTerms, noise: Noise) -> Evaluation:
    """Return loss and accuracy of the federation's model with noise.

    The results of a personal model are left out, and so are named measures: their range is not
    known, so no amount of noise protects them. Raises UsageError if nothing is left to report.
    """
    loss, accuracy = evaluation.loss, evaluation.accuracy
    if loss is None and accuracy is None:
        names = ", ".join(evaluation.measures)
        raise UsageError(
            f"with noise on reports an evaluation needs a loss or an accuracy; found {names}, "
            "whose range is not known. Let Task.evaluate return a loss too."
        )
    return Evaluation(
        samples=1,
        loss=None
        if loss is None
        else blurred(loss, terms.loss_bound, terms.noise_multiplier, noise),
        accuracy=None
        if accuracy is None
        else blurred(accuracy, 1.0, terms.noise_multiplier, noise),
    )


def _blocks(values: Vector) -> Iterator[Vector]:
    for first in range(0, len(values), BLOCK):
        yield values[first : first + BLOCK]
