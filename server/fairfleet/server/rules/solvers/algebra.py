"""Lengths and signs of combinations of rows, computed from inner products alone.

The length of a sum is the square root of a rounded difference of products, so it is known only to
about 1e-8 of the lengths of its terms. Code that divides by such a length must call `vanishes`
first: it keeps rounding noise out of the step. `gram` is always a (rows, rows) matrix here.
"""

from __future__ import annotations

import numpy as np

from fairfleet.server.rules.cohort import Indices, Vector

ZERO = 1e-30  # an update shorter than this counts as zero
VANISHING = 1e-6  # a sum this much shorter than its terms counts as zero


def scaled_down(values: Vector) -> tuple[Vector, int]:
    """Return values * 2^-e and e, such that the largest absolute value is between 1/2 and 1.

    The digits stay the same, and squares of the scaled values cannot overflow.
    """
    exponent = int(np.frexp(np.abs(values).max(initial=0.0))[1])
    return np.asarray(np.ldexp(values, -exponent)), exponent


def length(coefficients: Vector, gram: Vector) -> float:
    """Return the length of one combination: sqrt(c' G c)."""
    return float(np.sqrt(max(float(coefficients @ gram @ coefficients), 0.0)))


def lengths(lines: Vector, gram: Vector) -> Vector:
    """Return the lengths of many combinations, one line of coefficients each."""
    return np.asarray(np.sqrt(np.maximum(np.einsum("ki,ki->k", lines @ gram, lines), 0.0)))


def reach(coefficients: Vector, gram: Vector) -> float:
    """Return sum |c_k| |g_k|: the length if all terms pointed in the same direction."""
    return float(np.abs(coefficients) @ np.sqrt(np.diagonal(gram)))


def vanishes(coefficients: Vector, gram: Vector, tolerance: float = VANISHING) -> bool:
    """Return whether the combination is zero relative to its terms. Independent of scale."""
    return length(coefficients, gram) <= max(tolerance * reach(coefficients, gram), ZERO)


def nonzero_rows(gram: Vector) -> Indices:
    """Return the indices of the rows that are not zero: the clients whose model moved."""
    return np.flatnonzero(np.sqrt(np.diagonal(gram)) > ZERO)


def cosines_and_norms(gram: Vector) -> tuple[Vector, Vector]:
    """Return the matrix of cosines between the rows, and the rows' lengths."""
    norms = np.sqrt(np.diagonal(gram))
    return gram / np.outer(norms, norms), norms


def scatter(values: Vector, indices: Indices, size: int) -> Vector:
    """Return an array of `size` entries with the values at the indices and zero elsewhere."""
    out = np.zeros(size)
    out[indices] = values
    return out


def uniform(clients: int, rows: int) -> Vector:
    """Return the coefficients of the clients' mean: 1/clients for the first rows, then zero."""
    return scatter(np.full(clients, 1.0 / clients), np.arange(clients), rows)
