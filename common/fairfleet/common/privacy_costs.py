"""What releases with Gaussian noise cost, and the epsilon of their total. Server and client count
with these functions.

Fleets are neighbours if one client's data are replaced by any others; an update clipped to C then
moves by up to 2 C. The cost of a release is (sensitivity / noise)^2. Costs of Gaussian releases add
up exactly, and epsilon is exact too (Balle and Wang 2018). It needs no library, so that a client on
a small board can count its own releases.
"""

from __future__ import annotations

import math

REPLACED = 2.0  # how far a clipped update can move, in units of the clipping norm
TOLERANCE = 1e-12  # relative, of epsilon
MOST_HALVINGS = 200
ASYMPTOTIC = 25.0  # from here on, the series of Mills' ratio is exact in float64


def update_cost(noise_multiplier: float) -> float:
    """Return the cost of releasing one clipped update with noise of so many clipping norms.

    >>> update_cost(4.0), update_cost(0.0)
    (0.25, inf)
    """
    return _square(REPLACED / noise_multiplier) if noise_multiplier else math.inf


def report_cost(noise_multiplier: float, values: int) -> float:
    """Return the cost of releasing numbers in [0, bound], each with noise of so many bounds."""
    return values * _square(1.0 / noise_multiplier)


def _square(ratio: float) -> float:
    """Return the square. `**` raises on overflow, and multipliers come from peers."""
    return ratio * ratio


def gaussian_epsilon(cost: float, delta: float) -> float:
    """Return the smallest epsilon of Gaussian releases with this total cost, at this delta.

    >>> gaussian_epsilon(0.0, 1e-5), round(gaussian_epsilon(1.0, 1e-5), 3)
    (0.0, 4.377)
    """
    if cost == 0.0 or not math.isfinite(cost):
        return cost
    shift = math.sqrt(cost)
    if gaussian_delta(0.0, shift) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, shift) > delta:
        low, high = high, 2.0 * high
    for _ in range(MOST_HALVINGS):
        if high - low <= TOLERANCE * high:
            break
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_delta(middle, shift) > delta else (low, middle)
    return high  # never below the true value


def largest_cost(epsilon: float, delta: float) -> float:
    """Return the largest total cost of Gaussian releases whose epsilon is at most this one.

    >>> round(largest_cost(4.377, 1e-5), 3)
    1.0
    """
    low, high = 0.0, 1.0
    while gaussian_epsilon(high, delta) <= epsilon:
        low, high = high, 2.0 * high
    for _ in range(MOST_HALVINGS):
        if high - low <= TOLERANCE * high:
            break
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= epsilon else (low, middle)
    return low


def gaussian_delta(epsilon: float, shift: float) -> float:
    """Return delta of a Gaussian release whose mean can move by `shift` standard deviations."""
    near, far = epsilon / shift - shift / 2.0, epsilon / shift + shift / 2.0
    # exp(epsilon) times the tail at `far` is the density at `near` times Mills' ratio at `far`.
    return _tail(near) - _density(near) * mills_ratio(far)


def _tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2.0))


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def mills_ratio(x: float) -> float:
    """Return the tail of the normal distribution over its density, for x of at least 0."""
    if x < ASYMPTOTIC:
        return _tail(x) / _density(x)
    inverse = 1.0 / (x * x)
    terms = 1.0 - inverse * (1.0 - 3.0 * inverse * (1.0 - 5.0 * inverse * (1.0 - 7.0 * inverse)))
    return terms / x
