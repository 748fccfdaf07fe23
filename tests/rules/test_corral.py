"""With many more rows than dimensions, the solver is exact and FedLF merges the same layers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.server.rules.directions import fedlf
from fairfleet.server.rules.directions.fedlf import FedLF, Normalize, layer_members
from fairfleet.server.rules.solvers import min_norm
from fairfleet.server.rules.solvers.corral import (
    MANY_ROWS,
    Corral,
    is_of_low_rank,
    shortest_in_corral,
)
from fairfleet.server.rules.solvers.min_norm import min_norm_in_cone, min_norm_on_simplex

KINDS = [
    "plain",
    "shared direction",
    "duplicates",
    "opposed",
    "scales",
    "few directions",
    "one column",
    "equal",
]
seeds = st.integers(0, 2**32 - 1)


def rows_of(kind: str, m: int, d: int, seed: int) -> np.ndarray:
    """Return m random rows in d dimensions with the difficulty that `kind` names."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, d))
    match kind:
        case "shared direction":
            rows += 3.0 * rng.standard_normal(d)
        case "duplicates":
            rows = rows[rng.integers(0, max(m // 10, 1), m)] + 0.5
        case "opposed":
            rows[m // 2 :] = -rows[: m - m // 2]
        case "scales":
            rows = (rows + 2.0) * 10 ** rng.uniform(-8, 6, (m, 1))
        case "few directions":
            rows = np.eye(d)[rng.integers(0, d, m)] * rng.uniform(0.5, 2.0, (m, 1))
        case "one column":
            rows[:, 1:] = 0.0
        case "equal":
            rows[:] = rows[0]
    return rows


def gap(gram: np.ndarray, weights: np.ndarray) -> float:
    """Return the duality gap |x|^2 - min_k g_k.x, relative to the lengths.

    No convex combination is shorter by more than the gap.
    """
    norms, slope = np.sqrt(np.diagonal(gram)), gram @ weights
    return float((weights @ slope - slope.min()) / (norms.max() * (weights @ norms)))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, m=st.integers(MANY_ROWS, 3 * MANY_ROWS), d=st.integers(1, 20))
@settings(max_examples=25)
def test_weights_of_many_rows_in_few_dimensions_are_optimal(
    kind: str, seed: int, m: int, d: int
) -> None:
    rows = rows_of(kind, m, d, seed)
    gram = rows @ rows.T
    norms = np.linalg.norm(rows, axis=1)
    assert is_of_low_rank(gram / np.outer(norms, norms))
    weights, residual = min_norm_on_simplex(gram)
    vanishes = np.linalg.norm(weights @ rows) <= 1e-9 * (weights @ norms)
    assert vanishes or residual <= 1e-10
    assert weights.min() >= 0.0
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert gap(gram, weights) <= 1e-10
    assert vanishes or np.count_nonzero(weights) <= np.linalg.matrix_rank(
        rows
    )  # affinely independent


@given(seed=seeds, m=st.integers(MANY_ROWS, 2 * MANY_ROWS), d=st.integers(1, 20))
@settings(max_examples=25)
def test_starts_from_the_corral_and_from_a_corner_give_the_same_direction(
    seed: int, m: int, d: int
) -> None:
    rows = rows_of("shared direction", m, d, seed)
    norms = np.linalg.norm(rows, axis=1)
    unit = rows / norms[:, None]
    program = min_norm._Program(unit @ unit.T, norms.min() / norms, np.zeros(m), np.full(m, np.inf))
    corner = min_norm._follow_active_set(program, *min_norm._corner(program))
    corral = min_norm._follow_active_set(program, *min_norm._from_corral(program))
    np.testing.assert_allclose(corral @ unit, corner @ unit, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("m", "d", "shared"), [(1000, 13, 0.0), (1000, 13, 1.0), (1000, 260, 0.1)])
def test_a_thousand_rows_in_few_dimensions_are_solved_exactly(
    m: int, d: int, shared: float
) -> None:
    rng = np.random.default_rng(0)  # how fast: benchmarks/history.py
    rows = rng.standard_normal((m, d)) + shared * rng.standard_normal(d)
    gram = rows @ rows.T
    weights, residual = min_norm_on_simplex(gram)
    assert residual <= 1e-10
    assert gap(gram, weights) <= 1e-10


def test_rounding_does_not_make_the_solver_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows surround the origin, so the length of the shortest sum is rounding alone."""
    solves, on_free = [], min_norm._Program.on_free

    def counted(program: min_norm._Program, y: np.ndarray, free: np.ndarray) -> np.ndarray:
        solves.append(free.sum())
        return on_free(program, y, free)

    monkeypatch.setattr(min_norm._Program, "on_free", counted)
    rows = np.random.default_rng(0).standard_normal((1000, 260))
    assert min_norm_on_simplex(rows @ rows.T).residual <= 1e-10
    assert len(solves) < 50


def test_a_row_with_s_of_zero_is_used_among_many_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2 * MANY_ROWS, 6)) + 1.0
    rows[0] = -rows[1:].mean(axis=0)  # points against all others
    unit = rows / np.linalg.norm(rows, axis=1)[:, None]
    s = np.ones(2 * MANY_ROWS)
    s[0] = 0.0
    y, residual = min_norm_in_cone(unit @ unit.T, s)
    assert y[0] > 0.0
    assert s @ y == pytest.approx(1.0)
    assert residual <= 1e-10


def test_the_inverse_stays_correct_while_rows_are_admitted_and_removed() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((60, 30))
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    unit, s = rows @ rows.T, rng.uniform(0.5, 1.0, 60)
    corral = Corral(unit, s, 0.0, 3)
    for row in (7, 1, 40, 22, 13):
        assert corral.admit(row)
    for place in (2, 0, 3):
        corral._remove(place)
    for row in range(43, 59):  # more than the initial capacity
        assert corral.admit(row)
    rows_in_use = corral.rows
    assert set(rows_in_use) == {7, 13, 22, *range(43, 59)}
    matrix = unit[np.ix_(rows_in_use, rows_in_use)] + np.outer(s[rows_in_use], s[rows_in_use])
    np.testing.assert_allclose(
        corral._inverse[: len(rows_in_use), : len(rows_in_use)] @ matrix,
        np.eye(len(rows_in_use)),
        atol=1e-9,
    )


def test_a_copy_of_a_row_in_use_is_not_admitted() -> None:
    unit = np.ones((2, 2))
    assert not Corral(unit, np.ones(2), 0.0, 0).admit(1)
    start = shortest_in_corral(unit, np.ones(2), ridge=1e-14, optimal=1e-12, vanishing=1e-11)
    assert start.free.sum() == 1


def test_a_round_of_ordinary_shape_is_not_of_low_rank() -> None:
    rng = np.random.default_rng(0)
    for m, d, low in (
        (1000, 900, False),
        (100, 99, False),
        (MANY_ROWS - 2, 2, False),
        (1000, 100, True),
        (MANY_ROWS, 2, True),
    ):
        rows = rng.standard_normal((m, d))
        rows /= np.linalg.norm(rows, axis=1)[:, None]
        assert is_of_low_rank(rows @ rows.T) is low, (m, d)


# ---- FedLF with many rows -------------------------------------------------------------------


def fedlf_grams(seed: int, rows: int, layers: int, shared: float, zeros: float = 0.0) -> np.ndarray:
    """Return random products per layer; a share `zeros` of the rows is zero in each layer."""
    rng = np.random.default_rng(seed)
    parts = [
        rng.standard_normal((rows, 5)) + shared * rng.standard_normal(5) for _ in range(layers)
    ]
    for part in parts:
        part[rng.random(rows) < zeros] = 0.0
    return np.array([part @ part.T for part in parts])


@pytest.mark.parametrize("normalize", ["all_rows", "rows_then_p", "none"])
@pytest.mark.parametrize("with_p", [True, False])
def test_products_of_members_equal_those_of_their_lines_of_coefficients(
    normalize: Normalize, with_p: bool
) -> None:
    rng = np.random.default_rng(1)
    gram = fedlf_grams(1, 2 * MANY_ROWS, 1, 0.5, zeros=0.1)[0]
    members = layer_members(gram, 40, rng.standard_normal(40) if with_p else None, normalize)
    lines = members.lines
    assert len(lines) == len(members) < 2 * MANY_ROWS
    np.testing.assert_allclose(
        members.products(gram), lines @ gram @ lines.T, rtol=1e-12, atol=1e-12
    )
    if normalize != "none":
        mu = np.sqrt(np.diagonal(gram))[:40].mean()
        np.testing.assert_allclose(np.sqrt(np.diagonal(members.products(gram))), mu, rtol=1e-9)


@pytest.mark.slow
@given(
    seed=seeds,
    shared=st.sampled_from([0.0, 0.3, 1.0]),
    zeros=st.just(0.0) | st.just(0.4),
    rows=st.integers(20, 150),
)
@settings(max_examples=40)
def test_the_shortcut_for_vanishing_combinations_changes_no_result(
    seed: int, shared: float, zeros: float, rows: int
) -> None:
    gram, losses = (
        fedlf_grams(seed, rows, 4, shared, zeros),
        np.random.default_rng(seed).uniform(0.1, 3.0, 15),
    )
    for normalize in ("all_rows", "rows_then_p", "none"):
        rule = FedLF(normalize=normalize)
        short = rule.relaxed(gram, losses)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fedlf, "every_block_vanishes", lambda *given: False)
            long = rule.relaxed(gram, losses)
        assert (short is None) == (long is None)
        if short and long:
            assert short[1] == long[1]
            assert [(block.first, block.last) for block in short[0]] == [
                (block.first, block.last) for block in long[0]
            ]
            for quick, full in zip(short[0], long[0], strict=True):
                np.testing.assert_array_equal(quick.coefficients, full.coefficients)


def test_a_combination_does_not_vanish_in_a_layer_where_it_has_no_terms() -> None:
    first = np.array([[1.0], [-1.0], [0.0]])
    second = np.array([[0.0], [0.0], [1.0]])
    gram = np.array([first @ first.T, second @ second.T])
    assert not fedlf.every_block_vanishes(gram, 3, None, "all_rows", 1e-6)
