"""Medians and spreads of all values but one, so that no client influences its own limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# A normal distribution's standard deviation over its median absolute deviation.
NORMAL = 1.4826
LEAST_SPREAD = 0.1  # of the median: values that agree better than this count as equal


def medians_of_others(values: Vector) -> Vector:
    """Return, for each value, the median of all other values.

    >>> medians_of_others(np.array([1.0, 1000.0, 3.0, 2.0]))
    array([3., 2., 2., 3.])
    """
    order = np.argsort(values, kind="stable")
    ordered, rank = values[order], np.empty(len(values), np.intp)
    rank[order] = np.arange(len(values))
    high = (len(values) - 1) // 2
    low = high if len(values) % 2 == 0 else high - 1
    lower, upper = (ordered[middle + (rank <= middle)] for middle in (low, high))
    return np.asarray(lower + (upper - lower) / 2)


def spreads_of_others(values: Vector, medians: Vector) -> Vector:
    """Return, for each value, how far the others lie from their median, as a standard deviation.

    It is at least LEAST_SPREAD of that median. `medians` are those of `medians_of_others`.
    """
    spreads = np.empty(len(values))
    for median in np.unique(medians):  # at most three
        same_median = medians == median
        spreads[same_median] = NORMAL * medians_of_others(np.abs(values - median))[same_median]
    return np.maximum(spreads, LEAST_SPREAD * np.abs(medians))


def spread(deviations: Vector, median: float) -> float:
    """Return the spread of values that deviate so far from their median."""
    return max(NORMAL * float(np.median(deviations)), LEAST_SPREAD * abs(median))
