"""How evenly a fleet is served: measures on a vector of one value per client (accuracy, loss).

Values are taken in the unit they come in. The papers give accuracies in percent, so their mean, deviation,
worst and best are 100 times those of our fractions, and a variance 10,000 times. FedFV's "Var." is the standard
deviation in percent; FedLF's `fair` is the angle in radians. Angle, KL, Gini, Jain and the relative deviation have
no unit.

Of no client nothing is known: every measure is NaN. One client, or clients all alike (all zero too), are
served perfectly evenly: deviations, angle, KL and Gini are 0 and Jain is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]


def mean(values: ArrayLike) -> float:
    vector = _vector(values)
    # summed as differences, so that the mean of equal values is that value to the last bit
    return float(vector[0] + np.mean(vector - vector[0])) if len(vector) else math.nan


def standard_deviation(values: ArrayLike) -> float:
    """Of the population: divided by the number of clients, as all the papers do."""
    vector = _vector(values)
    return float(np.sqrt(np.mean((vector - mean(vector)) ** 2))) if len(vector) else math.nan


def variance(values: ArrayLike) -> float:
    return standard_deviation(values) ** 2


def relative_deviation(values: ArrayLike) -> float:
    """The standard deviation over the size of the mean; infinite where only the mean is 0."""
    deviation, middle = standard_deviation(values), abs(mean(values))
    if deviation == 0.0:
        return 0.0
    return deviation / middle if middle else math.inf


def angle(values: ArrayLike) -> float:
    """Between the values and the all-ones vector, in radians: arccos(mean / rms), without its loss of digits near 0."""
    return math.atan2(standard_deviation(values), mean(values))


def jain(values: ArrayLike) -> float:
    """(sum)^2 / (n * sum of squares): 1 when all are alike, 1/n when one client has everything."""
    return math.cos(angle(values)) ** 2


def kl_to_uniform(values: ArrayLike) -> float:
    """In nats, of the clients' shares in the sum from equal shares: 0 to ln n. NaN if a value is negative."""
    vector = _vector(values)
    if not len(vector) or vector.min() < 0:
        return math.nan
    if not vector.any():
        return 0.0
    ratios = vector[vector > 0] / mean(vector)
    return max(0.0, float(np.sum(ratios * np.log(ratios))) / len(vector))


def gini(values: ArrayLike) -> float:
    """Half the mean difference of two clients over the mean: 0 to (n - 1) / n. NaN if a value is negative."""
    vector = np.sort(_vector(values))
    if not len(vector) or vector[0] < 0:
        return math.nan
    if not vector.any():
        return 0.0
    count = len(vector)
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return float(ranks @ (vector - vector[0])) / (count**2 * mean(vector))


def share_of(percent: int, clients: int) -> int:
    """How many clients `percent` of them are: rounded down, at least one. 5 % of 100 are 5, 5 % of 10 are 1."""
    return max(1, clients * percent // 100)


def worst(values: ArrayLike, percent: int, *, higher_is_better: bool = True) -> float:
    """The mean of the `percent` of clients served worst: the lowest accuracies, or the highest losses."""
    return _tail(values, percent, lowest=higher_is_better)


def best(values: ArrayLike, percent: int, *, higher_is_better: bool = True) -> float:
    return _tail(values, percent, lowest=not higher_is_better)


def improved_share(before: ArrayLike, after: ArrayLike, *, higher_is_better: bool = True) -> float:
    """The share of clients that are served better than before; both vectors in the same order. NaN of no client."""
    old, new = _vector(before), _vector(after)
    if len(old) != len(new):
        raise ValueError(f"found {len(old)} values before and {len(new)} after; expected the same clients in both")
    return mean(new > old if higher_is_better else new < old)


@dataclass(frozen=True)
class Fairness:
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
        """All measures of one value per client; losses are given with `higher_is_better=False`."""
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
