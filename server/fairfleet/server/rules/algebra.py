"""Lengths and signs of combinations, from inner products alone, with the tests that keep rounding noise out.

The length of a sum computed from a Gram matrix is the square root of a rounded difference: known to about 1e-8 of
its terms. Whatever divides by such a length asks `vanishes` first.
"""

from __future__ import annotations

import numpy as np

from fairfleet.server.rules.base import Places, Vector

ZERO = 1e-30  # a client with a shorter update did not move
VANISHING = 1e-6


def length(coefficients: Vector, gram: Vector) -> float:
    return float(np.sqrt(max(float(coefficients @ gram @ coefficients), 0.0)))


def lengths(lines: Vector, gram: Vector) -> Vector:
    """Of many combinations, a line of coefficients each."""
    return np.asarray(np.sqrt(np.maximum(np.einsum("ki,ki->k", lines @ gram, lines), 0.0)))


def reach(coefficients: Vector, gram: Vector) -> float:
    """The length that the combination would have if its terms all pointed the same way."""
    return float(np.abs(coefficients) @ np.sqrt(np.diagonal(gram)))


def vanishes(coefficients: Vector, gram: Vector, tolerance: float = VANISHING) -> bool:
    """Is this combination zero as far as the matrix can tell? Free of scale."""
    return length(coefficients, gram) <= max(tolerance * reach(coefficients, gram), ZERO)


def moved(gram: Vector) -> Places:
    """Places of the rows that are not zero."""
    return np.flatnonzero(np.sqrt(np.diagonal(gram)) > ZERO)


def unit(gram: Vector) -> tuple[Vector, Vector]:
    """The matrix of cosines, and the norms."""
    norms = np.sqrt(np.diagonal(gram))
    return gram / np.outer(norms, norms), norms


def spread(values: Vector, places: Places, size: int) -> Vector:
    """The values at their places among `size` entries, zero elsewhere."""
    out = np.zeros(size)
    out[places] = values
    return out


def uniform(clients: int, rows: int) -> Vector:
    """The coefficients of the clients' mean among all rows."""
    return spread(np.full(clients, 1.0 / clients), np.arange(clients), rows)
