"""Local intrinsic dimension (LID) of a client's predictions, by maximum likelihood.

The predictions of a model that was trained on right labels lie near few points. Wrong labels
spread them out, so their dimension is larger (Ma et al., ICML 2018; FedCorr).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FLOOR = 1e-12  # distance between equal predictions, whose logarithm must be finite
OFFSET = 1e-6  # added to the largest distance, as in FedCorr's released code
CHUNK = 1 << 22  # differences that are in memory at a time


def intrinsic_dimension(predictions: NDArray[np.floating], neighbours: int = 20) -> float:
    """Return the mean LID of these predictions, one per row; NaN for fewer than three of them.

    The LID of a prediction follows from the distances r1 <= ... <= rk to its k nearest others:
    -k / sum(log(ri / rk)). With fewer others than `neighbours`, k is their number.
    """
    points = np.asarray(predictions, np.float64)
    count = min(neighbours, len(points) - 1)
    if count < 2:
        return float("nan")
    size = max(1, CHUNK // points.size)
    starts = range(0, len(points), size)
    return float(np.mean(np.concatenate([_lid(points, at, size, count) for at in starts])))


def _lid(points: NDArray[np.float64], start: int, size: int, count: int) -> NDArray[np.float64]:
    """Return the LID of the points from `start` on, at most `size` of them."""
    part = points[start : start + size]
    distances = np.sqrt(np.square(part[:, None, :] - points[None, :, :]).sum(2))
    own = np.arange(len(part))
    distances[own, start + own] = np.inf
    nearest = np.partition(distances, count - 1, axis=1)[:, :count]
    ratios = np.maximum(nearest, FLOOR) / (nearest[:, -1:] + OFFSET)
    return np.asarray(-count / np.log(ratios).sum(1))
