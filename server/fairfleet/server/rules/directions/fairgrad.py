"""FairGrad: the direction in a ball that is alpha-fair in the decreases of the losses.

Ban, Ji: Fair Resource Allocation in Multi-Task Learning, ICML 2024. The direction d maximises
sum (g_k . d)^(1 - alpha) / (1 - alpha) over |d| <= r. It is d = sum w_k g_k with w > 0 and
K w = w^(-1/alpha) for the Gram matrix K, up to its length. That equation is the optimality
condition of a convex problem in w, so its solution is unique.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector
from fairfleet.server.rules.directions.rescaling import rescaled
from fairfleet.server.rules.errors import RuleError
from fairfleet.server.rules.solvers.algebra import (
    cosines_and_norms,
    nonzero_rows,
    scatter,
    vanishes,
)
from fairfleet.server.rules.solvers.min_norm import min_norm_on_simplex

MAX_STEPS = 300  # of Newton's method
SETTLED = 1e-10  # the relative error of the equation at which it ends
PATIENCE = 100  # steps without a smaller error after which it ends
ROUNDING = 1e-14  # of a value, relative to its terms
USABLE = 1e-6  # the largest such error with which a solution is used
LONGEST = 3.0  # the largest change of the logarithm of a weight in one step
SUFFICIENT = 1e-4  # the share of the predicted decrease that a step must bring


class FairGrad(Rule):
    """d = sum w_k g_k with w > 0 and g_k . d = w_k^(-1/alpha) for every client.

    alpha = 1 is proportional fairness (Nash bargaining), a large alpha approaches max-min, an
    alpha near 0 the plain mean. Every loss falls, to first order.
    """

    summary: ClassVar[str] = "alpha-fair decreases of all losses: from the mean to max-min"
    alpha: float = Field(default=2.0, ge=0.1, le=20.0)
    length: Literal["mean", "literal"] = "mean"  # the ball's radius: the mean update; or |sum w g|

    def needs(self) -> Needs:
        """Return that the rule reads no losses."""
        return Needs(exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the alpha-fair direction of the clients whose update is not zero."""
        gram, size = cohort.own.whole, len(cohort.gram)
        moved = nonzero_rows(gram)
        if not len(moved):
            return Step(np.zeros(size), status="stationary")
        cosines, norms = cosines_and_norms(gram[np.ix_(moved, moved)])
        if vanishes(min_norm_on_simplex(cosines).weights, cosines):
            return Step(np.zeros(size), status="pareto_stationary")
        solution = alpha_fair_weights(cosines, np.log(norms), self.alpha)
        if not solution.error <= USABLE:
            raise RuleError(
                f"FairGrad's weights did not settle (error {solution.error:.1g}): lengths of "
                f"updates differ too much for alpha={self.alpha:g}. Choose an alpha nearer to 1, "
                "or limit the norms of updates (admission)"
            )
        weights = np.exp(solution.log_weights - solution.log_weights.max())
        factor = np.exp(solution.log_weights.max()) if self.length == "literal" else 1.0
        coefficients = scatter(weights * factor, moved, size)
        status = "ok" if len(moved) == len(cohort) else "zero_gradient_excluded"
        notes = {"w": coefficients[: len(cohort)]}
        if self.length == "literal":
            return Step(coefficients, status, notes=notes)
        return rescaled(coefficients, cohort.gram.whole, len(cohort), status, notes)


class AlphaFair(NamedTuple):
    """The solution of K w = w^(-1/alpha)."""

    log_weights: Vector
    error: float  # the largest relative error of the equation


def alpha_fair_weights(cosines: Vector, log_norms: Vector, alpha: float) -> AlphaFair:
    """Solve K w = w^(-1/alpha) for w > 0, given the cosines and lengths behind K.

    With z = |g| w it reads C z = c z^(-1/alpha), c = |g|^(1/alpha - 1): the minimum of
    z'Cz/2 - sum c z^(1 - 1/alpha) / (1 - 1/alpha), which is convex. Newton's method runs on
    log z, so z stays positive over any number of decades. A factor of all c only scales z.
    """
    log_c = (1.0 / alpha - 1.0) * log_norms
    shift = float(log_c.mean())
    problem = _Problem(cosines, log_c - shift, alpha)
    x = problem.log_c * alpha / (alpha + 1.0)  # the solution for orthogonal updates
    best, error, idle = x, problem.error(x), 0
    for _ in range(MAX_STEPS):
        if error <= SETTLED or idle == PATIENCE:
            break
        x = _line_search(problem, x)
        idle = 0 if (now := problem.error(x)) < error else idle + 1
        best, error = (best, error) if idle else (x, now)
    return AlphaFair(best + shift * alpha / (alpha + 1.0) - log_norms, error)


class _Problem(NamedTuple):
    """The convex problem in x = log z."""

    cosines: Vector
    log_c: Vector
    alpha: float

    def value(self, x: Vector) -> tuple[float, float]:
        """Return the function to minimise, and its rounding error."""
        z, power = np.exp(x), 1.0 - 1.0 / self.alpha
        gain = np.exp(self.log_c) * x if power == 0.0 else np.exp(self.log_c + power * x) / power
        square = 0.5 * float(z @ self.cosines @ z)
        terms = 0.5 * float(z.sum()) ** 2 + float(np.abs(gain).sum())
        return square - float(gain.sum()), ROUNDING * terms

    def sides(self, x: Vector) -> tuple[Vector, Vector]:
        """Return z * (C z) and c z^(1 - 1/alpha), which are equal at the solution."""
        z = np.exp(x)
        return z * (self.cosines @ z), np.exp(self.log_c + (1.0 - 1.0 / self.alpha) * x)

    def error(self, x: Vector) -> float:
        left, right = self.sides(x)
        return float(np.abs(left / right - 1.0).max())

    def newton(self, x: Vector) -> tuple[Vector, float]:
        """Return the step, with bounded entries, and the decrease that its slope promises."""
        z = np.exp(x)
        left, right = self.sides(x)
        gradient = left - right
        hessian = np.outer(z, z) * self.cosines + np.diag(right / self.alpha)
        scale = 1.0 / np.sqrt(np.diagonal(hessian))
        move = -scale * np.linalg.solve(hessian * np.outer(scale, scale), scale * gradient)
        move *= min(1.0, LONGEST / max(float(np.abs(move).max()), 1e-300))
        return move, float(-gradient @ move)


def _line_search(problem: _Problem, x: Vector) -> Vector:
    """Return the next point: a Newton step, halved until the value falls as its slope promises.

    Where rounding hides the fall, the longest such step is taken.
    """
    move, slope = problem.newton(x)
    value, noise = problem.value(x)
    rate = 1.0
    for _ in range(60):
        trial = x + rate * move
        if problem.value(trial)[0] <= value - SUFFICIENT * rate * slope + noise:
            return np.asarray(trial)
        rate /= 2.0
    return x
