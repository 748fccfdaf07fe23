"""The min-norm solver is exact: optimality holds to 1e-10 for every scale and rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.server.rules.solvers import min_norm
from fairfleet.server.rules.solvers.min_norm import (
    min_norm_in_box,
    min_norm_in_cone,
    min_norm_on_simplex,
)

seeds = st.integers(0, 2**32 - 1)


def rows_of(kind: str, m: int, seed: int) -> np.ndarray:
    """Return m random rows with the difficulty that `kind` names."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, 4 * m)) + rng.uniform(0, 1) * rng.standard_normal(4 * m)
    match kind:
        case "scales":
            rows *= 10 ** rng.uniform(-8, 6, (m, 1))
        case "few columns":
            rows = rows[:, : max(1, m // 3)] + 0.5
        case "twins":
            rows[m // 2 :] = rows[: m - m // 2]
        case "nearly twins":
            rows[-1] = rows[0] * (1 + 1e-7) + 1e-7 * rows[-1]
        case "opposed":
            rows[-1] = -rows[0]
        case "dependent":
            rows[-1] = rng.standard_normal(m - 1) @ rows[:-1] if m > 1 else rows[-1]
    return rows


KINDS = ["plain", "scales", "few columns", "twins", "nearly twins", "opposed", "dependent"]


def violation(gram: np.ndarray, weights: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
    """Return the distance from optimality relative to the lengths, without the solver's code."""
    norms = np.sqrt(np.diagonal(gram))
    slope, reach = gram @ weights, np.abs(weights) @ norms
    low, high = weights > lower + 1e-15, weights < upper - 1e-15  # may go down, may go up
    # No shift of weight from one row to another shortens the sum.
    gains = (slope[low].max() - slope[high].min()) if low.any() and high.any() else 0.0
    return float(max(gains, 0.0) / (norms.max() * reach))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, m=st.integers(1, 25))
@settings(max_examples=40)
def test_simplex_weights_are_optimal(kind: str, seed: int, m: int) -> None:
    rows = rows_of(kind, m, seed)
    gram = rows @ rows.T
    weights, residual = min_norm_on_simplex(gram)
    assert residual <= 1e-10
    assert weights.min() >= 0.0
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert violation(gram, weights, np.zeros(m), np.full(m, np.inf)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, m=st.integers(1, 25), epsilon=st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.3, 1.0]))
@settings(max_examples=40)
def test_box_weights_are_optimal_and_inside(kind: str, seed: int, m: int, epsilon: float) -> None:
    rows = rows_of(kind, m, seed)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    prior = np.random.default_rng(seed).uniform(0.1, 1.0, m)
    prior /= prior.sum()
    lower, upper = np.maximum(prior - epsilon, 0.0), prior + epsilon
    weights, residual = min_norm_in_box(rows @ rows.T, lower, upper)
    assert residual <= 1e-10
    assert (weights >= lower).all()
    assert (weights <= upper).all()
    assert weights.sum() == pytest.approx(1.0, abs=1e-10)
    assert violation(rows @ rows.T, weights, lower, upper) <= 1e-10


@given(seeds, st.integers(2, 12))
def test_guessing_and_following_the_active_set_give_the_same_direction(seed: int, m: int) -> None:
    rows = rows_of("plain", m, seed)
    norms = np.linalg.norm(rows, axis=1)
    unit = rows / norms[:, None]
    program = min_norm._Program(unit @ unit.T, norms.min() / norms, np.zeros(m), np.full(m, np.inf))
    slow, fast = (
        min_norm._follow_active_set(program, *min_norm._corner(program)),
        min_norm._guess_active_set(program),
    )
    assert fast is not None
    np.testing.assert_allclose(slow @ unit, fast @ unit, rtol=1e-9, atol=1e-12)


def test_a_row_with_s_of_zero_is_used_if_it_shortens_the_sum() -> None:
    unit = np.array([[1.0, -0.6], [-0.6, 1.0]])
    y, residual = min_norm_in_cone(unit, np.array([1.0, 0.0]))
    np.testing.assert_allclose(y, [1.0, 0.6])
    assert residual <= 1e-13


def test_bounds_that_admit_no_weights_are_an_error() -> None:
    with pytest.raises(ValueError, match="add up to one"):
        min_norm_in_box(np.eye(2), np.array([0.0, 0.0]), np.array([0.3, 0.3]))


@pytest.mark.parametrize("kind", ["plain", "scales", "twins", "dependent"])
def test_a_thousand_clients_are_solved_exactly(
    kind: str,
) -> None:  # how fast: benchmarks/minnorm.py
    rows = rows_of(kind, 1000, 0)
    gram = rows @ rows.T
    assert min_norm_on_simplex(gram).residual <= 1e-10
    unit = np.corrcoef(rows)
    assert min_norm_in_box(unit, np.zeros(1000), np.full(1000, 0.01)).residual <= 1e-10
