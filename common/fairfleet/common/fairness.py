"""Measure how evenly a model serves a fleet, from one value per client (accuracy or loss).

A measure has the unit of its values. The papers give accuracies in percent, so their mean,
deviation, worst and best are 100 times those of our fractions, and their variance 10,000 times.
FedFV's "Var." is the standard deviation in percent; FedLF's `fair` is the angle in radians.
Angle, KL, Gini, Jain and the relative deviation have no unit.

Without any client, every measure is NaN. One client, or clients with equal values (zeros
included), are served perfectly evenly: deviations, angle, KL and Gini are 0 and Jain is 1.
Values must be finite and one-dimensional; otherwise every measure raises ValueError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]


def mean(values: ArrayLike) -> float:
    """Return the mean of the clients' values."""
    vector = _vector(values)
    # Sum differences, so that the mean of equal values is exactly that value.
    return float(vector[0] + np.mean(vector - vector[0])) if len(vector) else math.nan


def standard_deviation(values: ArrayLike) -> float:
    """Return the population standard deviation: divided by n, as in all the papers."""
    vector = _vector(values)
    return float(np.sqrt(np.mean((vector - mean(vector)) ** 2))) if len(vector) else math.nan


def variance(values: ArrayLike) -> float:
    """Return the population variance."""
    return standard_deviation(values) ** 2


def relative_deviation(values: ArrayLike) -> float:
    """Return the standard deviation over |mean|; infinite if only the mean is 0."""
    deviation, middle = standard_deviation(values), abs(mean(values))
    if deviation == 0.0:
        return 0.0
    return deviation / middle if middle else math.inf


def angle(values: ArrayLike) -> float:
    """Return the angle between the values and the all-ones vector, in radians.

    It equals arccos(mean / rms), without the loss of digits near 0.
    """
    return math.atan2(standard_deviation(values), mean(values))


def jain(values: ArrayLike) -> float:
    """Return Jain's index, (sum)^2 / (n * sum of squares).

    It is 1 if all values are equal, and 1/n if one client has everything.
    """
    return math.cos(angle(values)) ** 2


def kl_to_uniform(values: ArrayLike) -> float:
    """Return the KL divergence of the clients' shares of the sum from equal shares, in nats.

    It lies between 0 and ln n. It is NaN if a value is negative.
    """
    vector = _vector(values)
    if not len(vector) or vector.min() < 0:
        return math.nan
    if not vector.any():
        return 0.0
    ratios = vector[vector > 0] / mean(vector)
    return max(0.0, float(np.sum(ratios * np.log(ratios))) / len(vector))


def gini(values: ArrayLike) -> float:
    """Return the Gini coefficient: half the mean difference of two clients, over the mean.

    It lies between 0 and (n - 1) / n. It is NaN if a value is negative.
    """
    vector = np.sort(_vector(values))
    if not len(vector) or vector[0] < 0:
        return math.nan
    if not vector.any():
        return 0.0
    count = len(vector)
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return float(ranks @ (vector - vector[0])) / (count**2 * mean(vector))


def share_of(percent: int, clients: int) -> int:
    """Return how many clients are `percent` of `clients`: rounded down, at least one.

    5 % of 100 clients are 5, and 5 % of 10 clients are 1.
    """
    return max(1, clients * percent // 100)


def worst(values: ArrayLike, percent: int, *, higher_is_better: bool = True) -> float:
    """Return the mean of the `percent` of clients that are served worst.

    These have the lowest accuracies, or the highest losses.
    """
    return _tail(values, percent, lowest=higher_is_better)


def best(values: ArrayLike, percent: int, *, higher_is_better: bool = True) -> float:
    """Return the mean of the `percent` of clients that are served best."""
    return _tail(values, percent, lowest=not higher_is_better)


def improved_share(
    before: ArrayLike, after: ArrayLike, *, higher_is_better: bool = True, strictly: bool = True
) -> float:
    """Return the share of clients that are served better than before.

    If not `strictly`, clients that are served as well as before count too: this is the ρ of AdaFed
    (equation 31) and FedMGDA+. Both vectors have the clients in the same order. Without any client
    the result is NaN.
    """
    old, new = _vector(before), _vector(after)
    if len(old) != len(new):
        raise ValueError(
            f"found {len(old)} values before and {len(new)} after; "
            "expected the same clients in both"
        )
    gained = new > old if higher_is_better else new < old
    return mean(gained if strictly else gained | (new == old))


@dataclass(frozen=True)
class Fairness:
    """All measures of one value per client. `clients` is the number of clients."""

    clients: int
    mean: float
    standard_deviation: float
    variance: float
    worst_5: float
    worst_10: float
    worst_30: float
    best_5: float
    best_10: float
    min: float
    max: float
    angle_degrees: float
    angle_radians: float
    kl_to_uniform: float
    gini: float
    jain: float
    relative_deviation: float

    @classmethod
    def of(cls, values: ArrayLike, *, higher_is_better: bool = True) -> Fairness:
        """Return all measures of one value per client. For losses, `higher_is_better` is False."""
        vector = _vector(values)
        return cls(
            clients=len(vector),
            mean=mean(vector),
            standard_deviation=standard_deviation(vector),
            variance=variance(vector),
            worst_5=worst(vector, 5, higher_is_better=higher_is_better),
            worst_10=worst(vector, 10, higher_is_better=higher_is_better),
            worst_30=worst(vector, 30, higher_is_better=higher_is_better),
            best_5=best(vector, 5, higher_is_better=higher_is_better),
            best_10=best(vector, 10, higher_is_better=higher_is_better),
            min=float(vector.min()) if len(vector) else math.nan,
            max=float(vector.max()) if len(vector) else math.nan,
            angle_degrees=math.degrees(angle(vector)),
            angle_radians=angle(vector),
            kl_to_uniform=kl_to_uniform(vector),
            gini=gini(vector),
            jain=jain(vector),
            relative_deviation=relative_deviation(vector),
        )


def _vector(values: ArrayLike) -> Values:
    vector = np.asarray(values, np.float64)
    if vector.ndim != 1:
        raise ValueError(f"found values of shape {vector.shape}; expected one number per client")
    if not np.isfinite(vector).all():
        raise ValueError("found NaN or infinity among the clients' values; leave those clients out")
    return vector


def _tail(values: ArrayLike, percent: int, *, lowest: bool) -> float:
    vector = np.sort(_vector(values))
    count = share_of(percent, len(vector))
    return mean(vector[:count] if lowest else vector[-count:])
