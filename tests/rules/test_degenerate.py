"""Degenerate rounds end in the documented fallback: finite, named, and free of rounding noise."""

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.results import Outcome, ServerState
from fairfleet.server.rules import Report, RuleError, listings, recipe

LAYERS = [6, 2, 8]
RNG = np.random.default_rng(7)
G = RNG.standard_normal((4, 16))
LOSSES = [0.5, 1.0, 2.0, 0.1]
ROUNDS = {
    "one client": (G[:1], LOSSES[:1]),
    "no client moved": (np.zeros((3, 16)), LOSSES[:3]),
    "one client did not move": (np.vstack([G[:3], np.zeros(16)]), LOSSES),
    "all the same": (np.repeat(G[:1], 3, axis=0), LOSSES[:3]),
    "all the same, equal losses": (np.repeat(G[:1], 3, axis=0), [1.0, 1.0, 1.0]),
    "exactly opposed": (np.array([G[0], -G[0]]), LOSSES[:2]),
    "opposed, unequal": (np.array([G[0], -2 * G[0]]), LOSSES[:2]),
    "more clients than parameters": (
        RNG.standard_normal((20, 16)) + 1.0,
        RNG.uniform(0.1, 2, 20).tolist(),
    ),
    "from 1e-8 to 1e6": (G * 10.0 ** np.array([[-8], [6], [0], [-3]]), LOSSES),
    "a loss of zero": (G, [0.0, 1.0, 2.0, 0.1]),
    "all losses zero": (G, [0.0] * 4),
    "equal losses": (G, [0.7] * 4),
    "huge losses": (G, [1e30, 1.0, 1e-30, 1e10]),
    "an empty layer": (np.hstack([np.zeros((4, 6)), G[:, 6:]]), LOSSES),
}


def run(name: str, kind: str, dtype: type = np.float64) -> Outcome:
    """Aggregate one of the ROUNDS with the rule of this name."""
    rows, losses = ROUNDS[kind]
    named = {f"c{k:02d}": row.astype(dtype) for k, row in enumerate(rows)}
    reports = {
        client: Report(10, loss, 1.0, 0.5, 2, 5, float(np.linalg.norm(row)), 0.1)
        for (client, row), loss in zip(named.items(), losses, strict=True)
    }
    return aggregate(np.zeros(16, dtype), named, reports, recipe(name), layers=LAYERS)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", ROUNDS)
@pytest.mark.parametrize("name", sorted(listings()))
def test_every_rule_gives_a_finite_step_and_state(name: str, kind: str, dtype: type) -> None:
    out = run(name, kind, dtype)
    assert np.isfinite(out.model).all()
    assert out.diagnostics.status
    assert out.state.rule is not None
    assert (
        type(out.state.rule).model_validate_json(out.state.rule.model_dump_json()) == out.state.rule
    )
    assert all(np.isfinite(vector).all() for vector in out.state.optimizer.vectors.values())
    assert "NaN" not in out.diagnostics.model_dump_json().replace("null", "")


@pytest.mark.parametrize("name", sorted(listings()))
def test_the_step_is_exactly_zero_if_no_client_moved(name: str) -> None:
    assert not run(name, "no client moved").step.any()


@pytest.mark.parametrize(
    ("name", "kind", "status"),
    [
        ("fedavg_n", "no client moved", "stationary"),
        ("fedmgda", "no client moved", "stationary"),
        ("fedmgda", "one client did not move", "zero_gradient_excluded"),
        ("fedmgda", "exactly opposed", "pareto_stationary"),
        ("fedmgda_plus", "opposed, unequal", "pareto_stationary"),
        ("fedfv", "exactly opposed", "zero_mean"),
        ("adafed", "all the same", "dependent_fallback"),
        ("adafed", "more clients than parameters", "dependent_fallback"),
        ("adafed", "exactly opposed", "pareto_stationary"),
        ("adafed", "all losses zero", "all_losses_zero"),
        ("adafedadam", "no client moved", "no_usable_client"),
        ("adafedadam", "one client did not move", "zero_gradient_excluded"),
        ("fedlf", "one client", "single_client"),
        ("fedlf", "equal losses", "p_dropped"),
        ("fedlf", "all the same", "p_dropped"),
        ("fedlf", "exactly opposed", "pareto_stationary"),
        ("fedmdfg", "exactly opposed", "pareto_stationary"),
        ("fedmdfg", "no client moved", "stationary"),
        ("drfl", "all losses zero", "all_losses_zero"),
        ("trimmed_mean", "exactly opposed", "trimmed_less"),
    ],
)
def test_the_status_names_the_fallback(name: str, kind: str, status: str) -> None:
    out = run(name, kind)
    assert out.diagnostics.status == status
    if status in ("stationary", "pareto_stationary", "no_usable_client"):
        assert not out.step.any()


def test_a_client_with_a_zero_update_does_not_stop_the_others() -> None:
    rows, _ = ROUNDS["one client did not move"]
    for name in ("fedmgda", "fedmgda_plus", "adafed", "fedlf", "fedmdfg"):
        out = run(name, "one client did not move")
        assert out.step.any()
        assert (rows[:3] @ out.step > 0).all(), name


def test_fedlf_merges_a_layer_of_zeros_with_its_neighbour() -> None:
    out = run("fedlf", "an empty layer")
    assert out.diagnostics.notes["groups"][0][1] >= 2
    assert not out.step[:6].any()


def test_adafedadam_keeps_its_state_if_no_client_is_usable() -> None:
    rows = {"a": np.zeros(16)}
    adafedadam = recipe("adafedadam")
    before = ServerState(None, adafedadam.optimizer.initial(16, np.float64))
    out = aggregate(
        np.ones(16),
        rows,
        {"a": Report(1, 1.0, 1.0, gradient_norm=0.0, local_lr=0.1)},
        adafedadam,
        state=before,
    )
    assert out.state.optimizer == before.optimizer
    assert (out.model == 1.0).all()


def test_a_missing_report_is_an_error_that_names_the_client() -> None:
    rows = {"ann": G[0], "bob": G[1]}
    with pytest.raises(
        RuleError, match="needs gradient_norm from every client and ann, bob did not"
    ):
        aggregate(np.zeros(16), rows, {c: Report(1, 1.0, 1.0) for c in rows}, recipe("adafedadam"))
    with pytest.raises(RuleError, match="no report from bob"):
        aggregate(np.zeros(16), rows, {"ann": Report(1, 1.0)}, recipe("fedavg"))
    with pytest.raises(RuleError, match="no update"):
        aggregate(np.zeros(16), {}, {}, recipe("fedavg"))
