"""Compare the min-norm solver with a general QP library: time and distance from the optimum.

    python benchmarks/minnorm.py --clients 10 100 1000

It prints one JSON object per size and kind of round. If clarabel (Apache-2.0) is installed, it
solves the same problems; FairFleet does not depend on it. `residual` is the violation of the
optimality conditions, relative to the lengths of the rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fairfleet.server.rules.solvers.min_norm import Matrix, min_norm_on_simplex

KINDS = ("independent", "correlated", "scales", "twins", "grad P")


def rows_of(kind: str, m: int) -> Matrix:
    """Return m rows of a kind."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((m, 4 * m))
    if kind == "correlated":
        rows += rng.standard_normal(4 * m)
    elif kind == "scales":
        rows *= 10 ** rng.uniform(-8, 6, (m, 1))
    elif kind == "twins":
        rows[m // 2 :] = rows[: m - m // 2]
    elif kind == "grad P":  # as in FedLF: one row in the span of the others
        rows[-1] = (rng.standard_normal(m - 1) - 0.1) @ rows[:-1]
    return rows


def best(work: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Return the best time of a call in seconds, and its result."""
    seconds, out = [], None
    for _ in range(times):
        began = time.perf_counter()
        out = work()
        seconds.append(time.perf_counter() - began)
    return min(seconds), out


def residual(gram: Matrix, weights: Matrix) -> float:
    """Return the largest violation of the optimality conditions, as a cosine.

    No row may have a smaller product with the combination than the combination with itself. For a
    row with a positive weight, the two must be equal; the difference counts by the weight.
    """
    norms, slope, square = np.sqrt(np.diagonal(gram)), gram @ weights, weights @ gram @ weights
    reach = weights @ norms
    gap = (slope - square) / (norms * reach)
    return float(max(-gap.min(), (np.abs(gap) * np.abs(weights) * norms / reach).max()))


def with_clarabel(gram: Matrix) -> Callable[[], Matrix] | None:
    """Return a call that solves the problem with clarabel; None if it is not installed."""
    try:
        import clarabel
        from scipy import sparse
    except ImportError:
        return None
    m, settings = len(gram), clarabel.DefaultSettings()
    settings.verbose = False
    quadratic = sparse.csc_matrix(np.triu(2.0 * gram))
    constraints = sparse.vstack([sparse.csc_matrix(np.ones((1, m))), -sparse.eye(m)], format="csc")
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(m)]

    def solve() -> Matrix:
        bounds = np.concatenate([[1.0], np.zeros(m)])
        solver = clarabel.DefaultSolver(
            quadratic, np.zeros(m), constraints, bounds, cones, settings
        )
        return np.asarray(solver.solve().x)

    return solve


def lines(sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield one line of figures per size and kind of rows."""
    for m in sizes:
        for kind in KINDS:
            rows = rows_of(kind, m)
            gram = rows @ rows.T
            seconds, solution = best(partial(min_norm_on_simplex, gram))
            line = {
                "clients": m,
                "kind": kind,
                "seconds": seconds,
                "residual": residual(gram, solution.weights),
            }
            if solve := with_clarabel(gram):
                seconds, weights = best(solve, 1)
                line |= {"clarabel_seconds": seconds, "clarabel_residual": residual(gram, weights)}
            yield {
                key: float(f"{value:.3g}") if isinstance(value, float) else value
                for key, value in line.items()
            }


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    for line in lines(parser.parse_args().clients):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
