"""Wolfe's algorithm for the shortest convex combination of many rows in few dimensions.

The rows in use, the corral, are affinely independent, so there is at most one more of them than
dimensions. Each step admits the row that points most against the sum. It then moves to the
shortest sum of the corral and removes rows whose weights would become negative. The inverse of
the corral's matrix is updated from step to step, so a step costs (rows in use) x (all rows) and
needs no new factorization. The result is a start for the exact active set of `min_norm`, which
solves once more from the matrix itself and checks; the rounding of many updates therefore cannot
reach a result.

P. Wolfe: Finding the nearest point in a polytope, Mathematical Programming 11, 1976.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]

MANY_ROWS = 64  # with fewer rows, one solve of all of them is as fast
LOW_RANK = 2 / 3  # the rank is low if fewer of the examined rows than this are independent
# A row with a pivot this small, on a unit diagonal, is a combination of those before it.
DEPENDENT = 1e-8
# The same for a row that is to join the corral: below, its weight would be rounding alone.
INSEPARABLE = 1e-13
# The inverse is recomputed where rows in use miss their optimum by more than this share of what
# the best new row promises.
DRIFT = 0.1


class Start(NamedTuple):
    """A feasible point from which an active-set method can start."""

    y: Matrix
    free: Mask  # where y is not zero


def is_of_low_rank(unit: Matrix) -> bool:
    """Return whether there are many rows, and few independent ones among the first of them.

    `unit` is a Gram matrix with a unit diagonal. The first 32 rows are examined, then twice as
    many, up to half of all: where few rows are independent, a small sample shows it.
    """
    half, count = len(unit) // 2, MANY_ROWS // 2
    while half >= count:
        # The addition to the diagonal keeps the factorization from failing. Pivots of dependent
        # rows are hardly larger than it.
        pivots = np.diagonal(np.linalg.cholesky(unit[:count, :count] + 1e-12 * np.eye(count))) ** 2
        if int((pivots > DEPENDENT).sum()) < LOW_RANK * count:
            return True
        if count == half:
            break
        count = min(2 * count, half)
    return False


def shortest_in_corral(
    unit: Matrix, s: Matrix, *, ridge: float, optimal: float, vanishing: float
) -> Start:
    """Return nearly the minimiser of y'Cy over y >= 0 with s.y = 1, and the rows that it uses.

    It is optimal to about `optimal`, a cosine. The search ends early where the sum is shorter
    than `vanishing` times its terms, or where a row cannot be distinguished from a combination of
    those in use.
    """
    corral = Corral(unit, s, ridge, int(np.argmax(s)))
    # Each step shortens the sum or removes a row. The limit ends a cycle caused by rounding.
    for _ in range(4 * len(s)):
        if not _improve(corral, s, optimal, vanishing) or not corral.descend():
            break
    return corral.start()


def _improve(corral: Corral, s: Matrix, optimal: float, vanishing: float) -> bool:
    """Admit the row that points most against the sum, or recompute an inaccurate inverse.

    Return False if the sum vanishes or no row can shorten it.
    """
    gradient, length, reach = corral.gradient()
    slope = gradient - s * corral.price(gradient)
    missed = float(np.abs(slope[corral.rows]).max())
    slope[corral.rows] = 0.0
    worst = int(np.argmin(slope))
    enough = max(optimal * length, rounding(len(corral.rows)) * reach)
    if length <= vanishing * reach:
        return False
    if not corral.is_fresh and missed > DRIFT * max(-float(slope[worst]), enough):
        corral.renew()
        return True
    if slope[worst] >= -enough:
        return False
    return corral.admit(worst)


def rounding(terms: int) -> float:
    """Return the error of a sum of inner products of unit rows, relative to its weights' sum."""
    return 1e-15 * max(1.0, terms / 16)


class Corral:
    """The rows in use, their weights, and the inverse of their part of C + s s' + ridge I."""

    def __init__(self, unit: Matrix, s: Matrix, ridge: float, first: int) -> None:
        """Start with row `first` alone, at the weight 1 / s[first]."""
        self._unit, self._s, self._ridge = unit, s, ridge
        self._count, self.is_fresh = 0, True  # fresh: the inverse was computed, not updated
        self._rows = np.zeros(16, np.intp)
        self._lines: Matrix = np.empty((16, len(s)))  # the lines of C of the rows in use
        self._inverse: Matrix = np.empty((16, 16))
        self._y = np.zeros(16)
        self._append(first)
        self._inverse[0, 0] = 1.0 / (unit[first, first] + s[first] ** 2 + ridge)
        self._y[0] = 1.0 / s[first]

    @property
    def rows(self) -> NDArray[np.intp]:
        """The indices of the rows in use."""
        return self._rows[: self._count]

    def gradient(self) -> tuple[Matrix, float, float]:
        """Return Cy, the length of the sum, and the length of its terms together."""
        y = self._y[: self._count]
        gradient = y @ self._lines[: self._count]
        square = max(float(y @ gradient[self.rows]), 0.0)
        return gradient, square**0.5, float(y.sum())

    def price(self, gradient: Matrix) -> float:
        """Return the multiplier of s.y = 1: the least-squares fit of gradient = price * s."""
        s = self._s[self.rows]
        return float(s @ gradient[self.rows]) / float(s @ s)

    def renew(self) -> None:
        """Recompute the inverse from the matrix."""
        rows, s = self.rows, self._s[self.rows]
        matrix = self._unit[np.ix_(rows, rows)] + np.outer(s, s) + self._ridge * np.eye(len(rows))
        self._inverse[: len(rows), : len(rows)] = np.linalg.inv(matrix)
        self.is_fresh = True

    def admit(self, row: int) -> bool:
        """Admit a row with weight zero. Return False if it depends on those in use."""
        k, s = self._count, self._s
        border = self._lines[:k, row] + s[row] * s[self.rows]
        along = self._inverse[:k, :k] @ border
        pivot = self._unit[row, row] + s[row] ** 2 + self._ridge - float(border @ along)
        if pivot <= INSEPARABLE:
            return False
        self._append(row)
        self._inverse[:k, :k] += np.multiply.outer(along, along / pivot)
        self._inverse[k, :k] = self._inverse[:k, k] = -along / pivot
        self._inverse[k, k] = 1.0 / pivot
        self.is_fresh = False
        return True

    def descend(self) -> bool:
        """Move to the shortest sum of the corral; return False if it has none.

        Where a weight reaches zero on the way, its row is removed and the move is repeated.
        """
        while True:
            k, s = self._count, self._s[self.rows]
            along = self._inverse[:k, :k] @ s
            goal, y = along / float(s @ along), self._y[:k]
            if not np.isfinite(goal).all():
                return False
            if (goal > 0.0).all():
                y[:] = goal
                return True
            falling = goal <= 0.0
            room = np.full(k, np.inf)
            room[falling] = y[falling] / (y[falling] - goal[falling] + 1e-300)
            first = int(np.argmin(room))
            y += min(float(room[first]), 1.0) * (goal - y)
            np.maximum(y, 0.0, out=y)
            if k == 1:
                return False
            self._remove(first)

    def start(self) -> Start:
        """Return the weights of all rows, and which of them are in use."""
        y, free = np.zeros(len(self._s)), np.zeros(len(self._s), np.bool_)
        y[self.rows], free[self.rows] = self._y[: self._count], True
        return Start(y, free)

    def _append(self, row: int) -> None:
        if self._count == len(self._rows):
            self._grow()
        k = self._count
        self._rows[k], self._lines[k], self._y[k] = row, self._unit[row], 0.0
        self._count += 1

    def _remove(self, position: int) -> None:
        """Remove the row at a position; the last row moves there."""
        k, last, inverse = self._count, self._count - 1, self._inverse
        line = inverse[position, :k].copy()
        inverse[:k, :k] -= np.multiply.outer(line, line / line[position])
        inverse[position, :k] = inverse[last, :k]
        inverse[:k, position] = inverse[:k, last]
        for values in (self._rows, self._lines, self._y):
            values[position] = values[last]
        self._count, self.is_fresh = last, False

    def _grow(self) -> None:
        k, room = self._count, 2 * self._count
        lines, inverse = np.empty((room, len(self._s))), np.empty((room, room))
        lines[:k], inverse[:k, :k] = self._lines, self._inverse
        self._lines, self._inverse = lines, inverse
        self._rows, self._y = np.resize(self._rows, room), np.resize(self._y, room)
