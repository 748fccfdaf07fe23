"""Shortest combinations of rows, solved exactly from their inner products.

The minimum-norm point of a convex hull, on the simplex or in a box, is a quadratic program:
minimise y'Cy subject to s.y = 1 and lower <= y <= upper. C has a unit diagonal and
y_k = weight_k |g_k|, so lengths from 1e-8 to 1e6 are harmless. Guesses of the complete active set
usually succeed after a few solves. Where they do not (dependent rows), a primal active set starts
from a corner and keeps its free rows affinely independent, so its systems are never singular.
With many more rows than dimensions, the guesses are skipped and the active set starts from the
result of Wolfe's algorithm (`corral`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.gram.blocks import single_threaded_blas
from fairfleet.server.rules.solvers.corral import (
    MANY_ROWS,
    is_of_low_rank,
    rounding,
    shortest_in_corral,
)

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]

OPTIMAL = 1e-12  # a cosine: how far the best unused row may point against the solution
STATIONARY = 1e-11  # a sum this much shorter than its terms is zero, as far as float64 can tell
# Added to the unit diagonal. It shares the weight among equal rows, and is far smaller than the
# errors for which the result is checked.
RIDGE = 1e-14
GUESSES = 30  # of the complete active set


class MinNorm(NamedTuple):
    """The solution of a minimum-norm problem."""

    weights: Matrix  # one per row
    residual: float  # of the optimality conditions, relative to the lengths of the rows


def min_norm_on_simplex(gram: Matrix) -> MinNorm:
    """Return the weights of the shortest convex combination of rows.

    `gram` contains their inner products. No row may be zero.

    >>> min_norm_on_simplex(np.array([[1.0, 0.0], [0.0, 4.0]])).weights
    array([0.8, 0.2])
    """
    norms = np.sqrt(np.diagonal(gram))
    y, residual = min_norm_in_cone(gram / np.outer(norms, norms), norms.min() / norms)
    weights = y / norms
    return MinNorm(weights / weights.sum(), residual)


def min_norm_in_box(gram: Matrix, lower: Matrix, upper: Matrix) -> MinNorm:
    """Return the shortest combination with weights that add up to one, each between its bounds.

    Raises ValueError if no such weights exist. No row may be zero.
    """
    if not lower.sum() <= 1.0 + 1e-9 or not upper.sum() >= 1.0 - 1e-9:
        raise ValueError(
            f"no weights between {lower} and {upper} add up to one; expected lower bounds with a "
            "sum of at most one and upper bounds with a sum of at least one"
        )
    norms = np.sqrt(np.diagonal(gram))
    unit, s = gram / np.outer(norms, norms), norms.min() / norms
    scale = norms.min()
    y, residual = _solve(_Program(unit, s, lower * norms / scale, upper * norms / scale))
    return MinNorm(np.clip(y * scale / norms, lower, upper), residual)


def min_norm_in_cone(unit: Matrix, s: Matrix) -> MinNorm:
    """Return the minimiser of y'Cy over y >= 0 with s.y = 1, where C = `unit`.

    A row with s_k = 0 may be used freely: it does not count towards s.y = 1.
    """
    zero = np.zeros(len(s))
    return MinNorm(*_solve(_Program(unit, s, zero, np.full(len(s), np.inf))))


@dataclass(frozen=True)
class _Program:
    """Minimise y'Cy subject to s.y = 1 and lower <= y <= upper, where C = `unit`."""

    unit: Matrix
    s: Matrix
    lower: Matrix
    upper: Matrix

    @property
    def is_cone(self) -> bool:
        """Return whether zero is the only bound."""
        return not self.lower.any() and bool(np.isinf(self.upper).all())

    def on_free(self, y: Matrix, free: Mask) -> Matrix:
        """Return the minimiser over the free entries, without bounds; the others stay fixed."""
        s, rest = self.s[free], np.where(free, 0.0, y)
        # Adding s s' changes nothing where s.y = 1, and makes the matrix definite for affinely
        # independent rows.
        definite = self.unit[np.ix_(free, free)] + np.outer(s, s) + RIDGE * np.eye(len(s))
        sides = np.column_stack([s, -(self.unit[free] @ rest)])
        along, fixed = np.linalg.solve(definite, sides).T
        budget = 1.0 - self.s @ rest
        minimiser = rest.copy()
        minimiser[free] = fixed + along * (budget - s @ fixed) / (s @ along)
        return minimiser

    def price(self, gradient: Matrix, y: Matrix, free: Mask) -> float:
        """Return the multiplier of s.y = 1.

        If no row is free, it is the least one that keeps rows at their upper bounds there.
        """
        if free.any():
            return float(self.s[free] @ gradient[free]) / float(self.s[free] @ self.s[free])
        each = np.divide(gradient, self.s, out=np.full(len(y), np.inf), where=self.s > 0.0)
        full = (y > self.lower) & (y >= self.upper)
        return float(each[full].max() if full.any() else each.min())

    def slopes(self, y: Matrix, free: Mask) -> tuple[Matrix, float]:
        """Return cosine-like multipliers of the bounds, and the relative length of the sum.

        The multipliers are zero where a row is free and optimal. The length of the sum is
        relative to the lengths of its terms together.
        """
        gradient = self.unit @ y
        square = max(float(y @ gradient), 0.0)
        price = self.price(gradient, y, free)
        reach = float(np.abs(y).sum())
        length = max(square**0.5, 1e-300)
        return (gradient - self.s * price) / length, length / max(reach, 1e-300)

    def against(self, y: Matrix, slope: Matrix) -> Matrix:
        """Return how much each row at a bound would gain by leaving it; zero without room."""
        return np.where(self.lower == self.upper, 0.0, np.where(y <= self.lower, -slope, slope))


def _solve(program: _Program) -> tuple[Matrix, float]:
    y = _solve_of_low_rank(program)
    if y is None:
        y = _guess_active_set(program)
    if y is None:
        y = _follow_active_set(program, *_start(program))
    return y, _residual(program, y)


def _solve_of_low_rank(program: _Program) -> Matrix | None:
    """Return the solution for many more rows than dimensions, None for other programs.

    Its many small steps gain nothing from BLAS's threads.
    """
    if not _has_many_rows(program):
        return None
    with single_threaded_blas():
        if not is_of_low_rank(program.unit):
            return None
        return _follow_active_set(program, *_start(program))


def _has_many_rows(program: _Program) -> bool:
    return program.is_cone and len(program.s) >= MANY_ROWS


def _noise(ratio: float, terms: int) -> float:
    """Return the error of a multiplier that comes from rounding in C.

    `ratio` is the length of the sum relative to the lengths of its `terms` terms together.
    """
    return max(OPTIMAL, rounding(terms) / ratio)


def _guess_active_set(program: _Program) -> Matrix | None:
    """Change all wrong bounds at once, and repeat (primal-dual active set).

    Returns None if the guesses repeat themselves or the free rows are dependent.
    """
    y = np.clip(np.zeros(len(program.s)), program.lower, program.upper)
    free = np.ones(len(y), bool)
    seen: set[bytes] = set()
    for _ in range(GUESSES):
        side = np.where(free, 0, np.where(y <= program.lower, -1, 1)).astype(np.int8)
        if side.tobytes() in seen or not free.any():
            return None
        seen.add(side.tobytes())
        try:
            goal = program.on_free(y, free)
        except np.linalg.LinAlgError:
            return None
        slope, ratio = program.slopes(goal, free)
        tolerance = _noise(ratio, 1)
        low, high = free & (goal < program.lower), free & (goal > program.upper)
        released = ((side == -1) & (slope < -tolerance)) | ((side == 1) & (slope > tolerance))
        y = np.clip(goal, program.lower, program.upper)
        if not (low | high | released).any():
            settled = np.abs(np.where(free, slope, 0.0)).max() <= 1e-10 and np.isfinite(y).all()
            return y if settled else None
        free = (free & ~low & ~high) | released
    return None


def _follow_active_set(program: _Program, y: Matrix, free: Mask) -> Matrix:
    """Free the row with the worst bound, move towards the minimiser, and repeat until optimal."""
    best, idle = np.inf, 0
    while idle <= 2 * min(len(y), MANY_ROWS):  # steps of length zero are limited
        y, free = _descend(program, y, free)
        slope, ratio = program.slopes(y, free)
        length = float(y @ program.unit @ y)
        best, idle = (length, 0) if length < best else (best, idle + 1)
        wrong = np.where(free, 0.0, program.against(y, slope))
        worst = int(np.argmax(wrong))
        if ratio <= STATIONARY or wrong[worst] <= _noise(ratio, int(free.sum())):
            break
        free[worst] = True
    return y


def _descend(program: _Program, y: Matrix, free: Mask) -> tuple[Matrix, Mask]:
    """Move to the minimiser on the free rows; a row that reaches a bound is fixed there."""
    while free.sum() > 1:  # a single free row cannot move
        try:
            goal = program.on_free(y, free)
        except np.linalg.LinAlgError:
            return y, free
        move = goal - y
        bound = np.where(move < 0, program.lower, program.upper)
        room = np.divide(bound - y, move, out=np.full(len(y), np.inf), where=free & (move != 0.0))
        first = int(np.argmin(room))
        if room[first] >= 1.0:
            return goal, free
        y = np.clip(y + max(float(room[first]), 0.0) * move, program.lower, program.upper)
        y[first] = bound[first]
        free = free.copy()
        free[first] = False
    return y, free


def _start(program: _Program) -> tuple[Matrix, Mask]:
    return _from_corral(program) if _has_many_rows(program) else _corner(program)


def _from_corral(program: _Program) -> tuple[Matrix, Mask]:
    return shortest_in_corral(
        program.unit, program.s, ridge=RIDGE, optimal=OPTIMAL, vanishing=STATIONARY
    )


def _corner(program: _Program) -> tuple[Matrix, Mask]:
    """Return a feasible point with at most one free entry, filling the largest s_k first."""
    y, missing = program.lower.copy(), 1.0 - float(program.s @ program.lower)
    free = np.zeros(len(y), bool)
    for k in np.argsort(-program.s, kind="stable"):
        if program.s[k] <= 0.0:
            break
        room = program.upper[k] - program.lower[k]
        if missing <= room * program.s[k]:
            y[k] += max(missing, 0.0) / program.s[k]
            free[k] = True
            break
        y[k], missing = program.upper[k], missing - room * program.s[k]
    return y, free


def _residual(program: _Program, y: Matrix) -> float:
    free = (y > program.lower) & (y < program.upper)
    slope, ratio = program.slopes(y, free)
    wrong = np.where(free, np.abs(slope), program.against(y, slope))
    return float(max(wrong.max(), 0.0) * ratio)
