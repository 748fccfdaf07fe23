"""A mixture of two Gaussians over single numbers, fitted by expectation maximisation.

It is deterministic: it starts from the split of the sorted values with the least squared error.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
STEPS = 200
TOLERANCE = 1e-9  # of the means, relative to the deviation of all values
LEAST_SIZE = 0.5  # of a component, in values; with less, the first split stands
LEAST_VARIANCE = 1e-4  # of a component, relative to the variance of all values


def upper_component(values: Values) -> NDArray[np.bool_]:
    """Return which values belong to the component with the higher mean.

    A value below the lower mean never does, and one above the higher mean always does: without
    this, a wide component would take both ends. Equal values all belong to the lower component.
    """
    points = np.asarray(values, np.float64)
    result = np.zeros(len(points), bool)
    if len(points) > 1 and points.std() > 0:
        order = np.argsort(points)  # Sums then do not depend on the order of the values.
        result[order] = _upper_of_sorted(points[order])
    return result


def _upper_of_sorted(points: Values) -> NDArray[np.bool_]:
    scaled = (points - points.mean()) / points.std()
    first_split = _best_split(scaled)
    share = first_split.astype(np.float64)  # of the upper component in each value
    means = np.zeros(2)
    for _ in range(STEPS):
        if min(share.sum(), len(share) - share.sum()) < LEAST_SIZE:
            return first_split
        before = means
        means, variances, weights = _components(scaled, share)
        share = _responsibility(scaled, means, variances, weights)
        if np.abs(means - before).max() < TOLERANCE:
            break
    lower, upper = means.min(), means.max()
    belongs = share > 0.5 if means[1] >= means[0] else share < 0.5
    return np.asarray((belongs | (scaled > upper)) & (scaled > lower))


def _best_split(points: Values) -> NDArray[np.bool_]:
    """Return which sorted points are above the cut that leaves the least squared error."""
    sizes = np.arange(1, len(points))
    sums, total = np.cumsum(points)[:-1], points.sum()
    # The error is least where the sum of the squared group means, by size, is largest.
    gain = sums**2 / sizes + (total - sums) ** 2 / (len(points) - sizes)
    gain[points[1:] == points[:-1]] = -np.inf  # equal points stay together
    return np.asarray(points > points[int(np.argmax(gain))])


def _components(points: Values, share: Values) -> tuple[Values, Values, Values]:
    """Return means, variances and weights of the lower and the upper component."""
    shares = np.stack([1.0 - share, share])
    sizes = shares.sum(1)
    means = shares @ points / sizes
    variances = (shares * np.square(points - means[:, None])).sum(1) / sizes
    return means, np.maximum(variances, LEAST_VARIANCE), sizes / len(points)


def _responsibility(points: Values, means: Values, variances: Values, weights: Values) -> Values:
    """Return the probability of each point that it is of the upper component."""
    log_density = (
        np.log(weights)[:, None]
        - 0.5 * np.log(variances)[:, None]
        - 0.5 * np.square(points - means[:, None]) / variances[:, None]
    )
    difference = np.clip(log_density[0] - log_density[1], -700.0, 700.0)
    return np.asarray(1.0 / (1.0 + np.exp(difference)))
