"""Shortest combinations, exactly: the minimum-norm point of a convex hull, on the simplex or in a box.

Both are one quadratic program: minimise y'Cy subject to s.y = 1 and lower <= y <= upper, where C has a unit
diagonal and y_k = weight_k |g_k|, so that norms from 1e-8 to 1e6 are harmless. Guesses of the whole active set
end in a few solves as a rule; where they do not (dependent rows), a primal active set starts from a corner and
keeps its free rows affinely independent, so its systems are never singular.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]

OPTIMAL = 1e-12  # a cosine: how far the best unused row may point against the solution
STATIONARY = 1e-11  # a sum this much shorter than its terms is zero, as far as float64 can tell
RIDGE = 1e-14  # on a unit diagonal: shares the weight of equal rows, far below what the result is checked for
GUESSES = 30


class MinNorm(NamedTuple):
    weights: Matrix
    residual: float  # of the optimality conditions, relative to the lengths of the rows


def min_norm_on_simplex(gram: Matrix) -> MinNorm:
    """The shortest convex combination of rows, given their inner products. No row may be zero.

    >>> min_norm_on_simplex(np.array([[1.0, 0.0], [0.0, 4.0]])).weights
    array([0.8, 0.2])
    """
    norms = np.sqrt(np.diagonal(gram))
    y, residual = min_norm_in_cone(gram / np.outer(norms, norms), norms.min() / norms)
    weights = y / norms
    return MinNorm(weights / weights.sum(), residual)


def min_norm_in_box(gram: Matrix, lower: Matrix, upper: Matrix) -> MinNorm:
    """The shortest combination with weights that add up to one, each between its bounds."""
    if not lower.sum() <= 1.0 + 1e-9 or not upper.sum() >= 1.0 - 1e-9:
        raise ValueError(f"no weights between {lower} and {upper} add up to one")
    norms = np.sqrt(np.diagonal(gram))
    unit, s = gram / np.outer(norms, norms), norms.min() / norms
    scale = norms.min()
    y, residual = _solve(_Program(unit, s, lower * norms / scale, upper * norms / scale))
    return MinNorm(np.clip(y * scale / norms, lower, upper), residual)


def min_norm_in_cone(unit: Matrix, s: Matrix) -> MinNorm:
    """Minimises y'Cy over y >= 0 with s.y = 1. A row with s_k = 0 may be used at no price."""
    zero = np.zeros(len(s))
    return MinNorm(*_solve(_Program(unit, s, zero, np.full(len(s), np.inf))))


@dataclass(frozen=True)
class _Program:
    """min y'Cy  subject to  s.y = 1,  lower <= y <= upper."""

    unit: Matrix
    s: Matrix
    lower: Matrix
    upper: Matrix

    def on_free(self, y: Matrix, free: Mask) -> Matrix:
        """The minimiser over the free entries, the others as they are, without the bounds."""
        s, rest = self.s[free], np.where(free, 0.0, y)
        # adding s s' changes nothing where s.y = 1, and makes the matrix definite for affinely independent rows
        definite = self.unit[np.ix_(free, free)] + np.outer(s, s) + RIDGE * np.eye(len(s))
        sides = np.column_stack([s, -(self.unit[free] @ rest)])
        along, fixed = np.linalg.solve(definite, sides).T
        budget = 1.0 - self.s @ rest
        found = rest.copy()
        found[free] = fixed + along * (budget - s @ fixed) / (s @ along)
        return found

    def price(self, gradient: Matrix, y: Matrix, free: Mask) -> float:
        """The multiplier of s.y = 1. With nothing free, the least that keeps full rows full."""
        if free.any():
            return float(self.s[free] @ gradient[free]) / float(self.s[free] @ self.s[free])
        each = np.divide(gradient, self.s, out=np.full(len(y), np.inf), where=self.s > 0.0)
        full = (y > self.lower) & (y >= self.upper)
        return float(each[full].max() if full.any() else each.min())

    def slopes(self, y: Matrix, free: Mask) -> tuple[Matrix, float]:
        """Cosine-like multipliers of the bounds (zero where free), and the relative length of the sum."""
        gradient = self.unit @ y
        square = max(float(y @ gradient), 0.0)
        price = self.price(gradient, y, free)
        reach = float(np.abs(y).sum())
        length = max(square**0.5, 1e-300)
        return (gradient - self.s * price) / length, length / max(reach, 1e-300)

    def against(self, y: Matrix, slope: Matrix) -> Matrix:
        """How much each row at a bound would gain by leaving it. A row with no room has nothing to gain."""
        return np.where(self.lower == self.upper, 0.0, np.where(y <= self.lower, -slope, slope))


def _solve(program: _Program) -> tuple[Matrix, float]:
    y = _guess_active_set(program)
    if y is None:
        y = _follow_active_set(program)
    return y, _residual(program, y)


def _noise(ratio: float) -> float:
    """What rounding in C does to a multiplier when the sum is shorter than its terms by this ratio."""
    return max(OPTIMAL, 1e-15 / ratio)


def _guess_active_set(program: _Program) -> Matrix | None:
    """Swaps all wrong bounds at once (primal-dual active set). None if it goes in circles or meets dependence."""
    y = np.clip(np.zeros(len(program.s)), program.lower, program.upper)
    free = np.ones(len(y), bool)
    seen: set[bytes] = set()
    for _ in range(GUESSES):
        at = np.where(free, 0, np.where(y <= program.lower, -1, 1)).astype(np.int8)
        if at.tobytes() in seen or not free.any():
            return None
        seen.add(at.tobytes())
        try:
            found = program.on_free(y, free)
        except np.linalg.LinAlgError:
            return None
        slope, ratio = program.slopes(found, free)
        tolerance = _noise(ratio)
        low, high = free & (found < program.lower), free & (found > program.upper)
        released = ((at == -1) & (slope < -tolerance)) | ((at == 1) & (slope > tolerance))
        y = np.clip(found, program.lower, program.upper)
        if not (low | high | released).any():
            settled = np.abs(np.where(free, slope, 0.0)).max() <= 1e-10 and np.isfinite(y).all()
            return y if settled else None
        free = (free & ~low & ~high) | released
    return None


def _follow_active_set(program: _Program) -> Matrix:
    """From a corner, one row at a time: frees the worst bound, moves to the minimiser or to the first bound hit."""
    y, free = _corner(program)
    best, idle = np.inf, 0
    while idle <= 2 * len(y):  # a step may be of length zero, but not for ever
        y, free = _descend(program, y, free)
        slope, ratio = program.slopes(y, free)
        length = float(y @ program.unit @ y)
        best, idle = (length, 0) if length < best else (best, idle + 1)
        wrong = np.where(free, 0.0, program.against(y, slope))
        worst = int(np.argmax(wrong))
        if ratio <= STATIONARY or wrong[worst] <= _noise(ratio):
            break
        free[worst] = True
    return y


def _descend(program: _Program, y: Matrix, free: Mask) -> tuple[Matrix, Mask]:
    """Goes to the minimiser on the free rows, giving up those that hit a bound on the way."""
    while free.sum() > 1:  # one alone has nowhere to go
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


def _corner(program: _Program) -> tuple[Matrix, Mask]:
    """A feasible point with at most one entry off its bounds: the cheapest rows are filled first."""
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
