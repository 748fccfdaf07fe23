"""The theorems of the papers hold for our steps on random rounds."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairfleet.server.aggregation.aggregator import Aggregation, aggregate
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.results import Outcome
from fairfleet.server.gram import Gram
from fairfleet.server.rules import Cohort, PastRow, Report, listings, recipe
from fairfleet.server.rules.directions.fedlf import fairness_gradient
from tests.support.samples.cohorts import Rows, fleet, seeds

few = st.integers(2, 9)


def step(rows: Rows, reports: dict[str, Report], name: str, **parameters: object) -> Outcome:
    """Aggregate one round with the rule of this name; the model has two layers."""
    size = len(next(iter(rows.values())))
    return aggregate(
        np.zeros(size),
        rows,
        reports,
        recipe(name, **parameters),
        layers=[size // 2, size - size // 2],
    )


@given(seeds, few, st.floats(0.0, 5.0), st.sampled_from(["mean", "literal"]))
def test_adafed_lowers_each_loss_in_proportion_to_its_power(
    seed: int, m: int, gamma: float, length: str
) -> None:
    rows, reports = fleet(seed, m)
    out = step(rows, reports, "adafed", gamma=gamma, length=length)
    assert out.diagnostics.status == "ok"
    rates = np.array(
        [row @ out.step / reports[client].loss ** gamma for client, row in rows.items()]
    )
    assert (rates > 0).all()
    np.testing.assert_allclose(rates, rates[0], rtol=1e-6)


@given(seeds, few)
def test_adafed_step_is_as_long_as_the_mean_update(seed: int, m: int) -> None:
    rows, reports = fleet(seed, m)
    mean = np.linalg.norm(np.mean(list(rows.values()), axis=0))
    assert np.linalg.norm(step(rows, reports, "adafed", gamma=5).step) == pytest.approx(
        mean, rel=1e-9
    )


@given(seeds, few, st.integers(1, 4), st.sampled_from(["adafed", "fedmgda_plus"]))
def test_absent_clients_with_recent_rows_can_be_objectives(
    seed: int, m: int, absent: int, name: str
) -> None:
    rows, reports = fleet(seed, m)
    rng = np.random.default_rng(seed + 1)
    history = History([40], precision="float64")
    for k in range(absent):
        history.put(
            f"away {k}",
            10 - k,
            rng.standard_normal(40),
            loss=float(rng.uniform(0.1, 3)),
            samples=9,
        )
    history.put("long gone", 1, rng.standard_normal(40), loss=1.0, samples=9)
    chosen_rule = recipe(name, absent="history", absent_rounds=4)
    out = aggregate(
        np.zeros(40), rows, reports, chosen_rule, layers=[40], round_number=11, history=history
    )
    assume(out.diagnostics.status == "ok")
    assert set(out.diagnostics.notes["hist_used"]) == {f"away {k}" for k in range(absent)}
    past = history.rows()
    for client in out.diagnostics.notes["hist_used"]:
        assert history.row(client) @ out.step > 0, client
    if name == "adafed":
        rates = [row @ out.step / reports[client].loss for client, row in rows.items()]
        rates += [
            history.row(client) @ out.step / past[client].loss
            for client in out.diagnostics.notes["hist_used"]
        ]
        np.testing.assert_allclose(rates, rates[0], rtol=1e-6)
    ignored = aggregate(
        np.zeros(40), rows, reports, recipe(name), layers=[40], round_number=11, history=history
    )
    np.testing.assert_array_equal(
        ignored.step, aggregate(np.zeros(40), rows, reports, recipe(name), layers=[40]).step
    )


@given(seeds, few)
def test_fedmgda_lowers_every_loss_at_least_by_its_own_square(seed: int, m: int) -> None:
    rows, reports = fleet(seed, m)
    d = step(rows, reports, "fedmgda").step
    for row in rows.values():
        assert row @ d >= d @ d * (1 - 1e-9)


@given(seeds, st.integers(2, 30), st.integers(1, 6))
def test_fedmgda_harms_no_client_even_with_more_clients_than_parameters(
    seed: int, m: int, d: int
) -> None:
    rows, reports = fleet(seed, m, d + 1)
    outcome = step(rows, reports, "fedmgda")
    assert outcome.diagnostics.conflicts == []
    assert outcome.step.any() == (outcome.diagnostics.status == "ok")


@given(seeds, few, st.integers(0, 3), st.sampled_from(["all_rows", "none"]))
def test_fedlf_conflicts_with_no_client_in_any_layer_and_makes_losses_fairer(
    seed: int, m: int, absent: int, normalize: str
) -> None:
    rows, reports = fleet(seed, m)
    rng = np.random.default_rng(seed)
    history = History([10, 5, 25], precision="float64")
    for k in range(absent * m):
        history.put(f"away {k}", 9, rng.standard_normal(40))
    chosen_rule = recipe("fedlf", normalize=normalize)
    out = aggregate(
        np.zeros(40),
        rows,
        reports,
        chosen_rule,
        layers=[10, 5, 25],
        round_number=10,
        history=history,
    )
    assume(out.diagnostics.status == "ok")
    groups = [[0, 10, 15, 40][edge] for group in out.diagnostics.notes["groups"] for edge in group]
    for start, stop in [(0, 40), *zip(groups[::2], groups[1::2], strict=True)]:
        part = out.step[start:stop]
        for row in [
            *rows.values(),
            *(history.row(client) for client in history.rows() if absent > 1),
        ]:
            assert row[start:stop] @ part >= -1e-9 * np.linalg.norm(
                row[start:stop]
            ) * np.linalg.norm(part)
    losses = np.array([report.loss for report in reports.values()])
    q = fairness_gradient(losses)
    assert q is not None
    assert (q @ np.array(list(rows.values()))) @ out.step > 0


@given(seeds)
def test_the_fairness_gradient_is_that_of_the_negative_cosine(seed: int) -> None:
    losses = np.random.default_rng(seed).uniform(0.1, 3.0, 5)
    q = fairness_gradient(losses)

    def p(f: np.ndarray) -> float:
        return float(-f.sum() / np.linalg.norm(f) / 5**0.5)

    slope = [(p(losses + e) - p(losses - e)) / 2e-6 for e in 1e-6 * np.eye(5)]
    np.testing.assert_allclose(q, slope, atol=1e-8)


@given(seeds)
def test_fedfv_with_two_conflicting_clients_is_the_closed_form(seed: int) -> None:
    rows, reports = fleet(seed, 2)
    a, b = rows.values()
    if a @ b > 0:
        rows["client 001"] = b = -b
    mean = (a + b) / 2
    dot = a @ b
    g = (a - dot / (b @ b) * b + b - dot / (a @ a) * a) / 2
    want = g * np.linalg.norm(mean) / np.linalg.norm(g)
    np.testing.assert_allclose(
        step(rows, reports, "fedfv", alpha=0).step, want, rtol=1e-7, atol=1e-9
    )


@given(seeds, few, st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.9]))
def test_fedfv_equals_the_papers_algorithm_on_vectors(seed: int, m: int, alpha: float) -> None:
    rows, reports = fleet(seed, m)
    clients = sorted(rows, key=lambda client: reports[client].loss)
    keep = 0 if alpha == 0 else m - int(np.ceil((m - 1) * (1 - alpha) - 1e-9))
    total = np.zeros(40)
    for client in clients:
        p = rows[client].copy()
        for rival in clients if client not in clients[m - keep :] else []:
            if rival != client and p @ rows[rival] < 0:
                p -= p @ rows[rival] / (rows[rival] @ rows[rival]) * rows[rival]
        total += p / m
    mean = np.mean(list(rows.values()), axis=0)
    want = total * np.linalg.norm(mean) / np.linalg.norm(total)
    np.testing.assert_allclose(
        step(rows, reports, "fedfv", alpha=alpha).step, want, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("losses", [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (3.0, 1.0, 2.0)])
def test_of_the_rules_in_fedlfs_figure_1_only_fedlf_harms_no_client(
    losses: tuple[float, ...],
) -> None:
    gradients = ((-1.0, 0.5, 0.0), (0.8, -1.0, 0.0), (1.0, 1.0, -1.0))
    rows = {f"client {k}": np.array(gradient) for k, gradient in enumerate(gradients)}
    reports = {f"client {k}": Report(1, loss) for k, loss in enumerate(losses)}

    def _least(name: str, **parameters: object) -> float:
        built = recipe(name, **parameters)
        taken = aggregate(np.zeros(3), rows, reports, built, layers=[3]).step
        return float(min(taken @ row for row in rows.values()))

    assert _least("fedavg", weighting="uniform") < 0
    assert _least("fedfv", alpha=0) < 0
    assert _least("fedmgda_plus", epsilon=0.1) < 0
    assert _least("fedlf") > 0


@given(seeds, few)
def test_fedfv_without_projections_is_fedavg(seed: int, m: int) -> None:
    rows, reports = fleet(seed, m)
    plain = step(rows, reports, "fedavg", weighting="uniform").step
    np.testing.assert_allclose(
        step(rows, reports, "fedfv", alpha=1).step, plain, rtol=1e-9, atol=1e-12
    )


@given(seeds, few, st.sampled_from(["uniform", "samples"]))
def test_fedmgda_plus_with_epsilon_zero_is_fedavg_n(seed: int, m: int, prior: str) -> None:
    rows, reports = fleet(seed, m)
    boxed = step(rows, reports, "fedmgda_plus", epsilon=0, lam0=prior).step
    np.testing.assert_allclose(
        boxed, step(rows, reports, "fedavg_n", weighting=prior).step, rtol=1e-9, atol=1e-12
    )


@given(seeds, few, st.floats(0.0, 1.0), st.sampled_from([1e-6, 1e6]))
def test_inflating_one_update_does_not_change_fedmgda_plus(
    seed: int, m: int, epsilon: float, factor: float
) -> None:
    rows, reports = fleet(seed, m)
    honest = step(rows, reports, "fedmgda_plus", epsilon=epsilon).step
    first = next(iter(rows))
    inflated = step(
        {**rows, first: rows[first] * factor}, reports, "fedmgda_plus", epsilon=epsilon
    ).step
    np.testing.assert_allclose(inflated, honest, rtol=1e-6, atol=1e-6 * np.linalg.norm(honest))


ALL = sorted(listings())


@pytest.mark.parametrize("name", ALL)
@given(seed=seeds, m=few)
@settings(max_examples=15)
def test_order_of_arrival_changes_no_bit_of_the_model(name: str, seed: int, m: int) -> None:
    rows, reports = fleet(seed, m)
    rows = {client: row.astype(np.float32) for client, row in rows.items()}
    model = np.random.default_rng(seed).standard_normal(40).astype(np.float32)
    want = aggregate(model, rows, reports, recipe(name), layers=[20, 20])
    work = Aggregation(recipe(name), [20, 20])
    for client in np.random.default_rng(seed).permutation(list(rows)):
        work.add(str(client), rows[str(client)])
    outcome = work.finish(model, reports)
    assert outcome.model.tobytes() == want.model.tobytes()
    assert outcome.diagnostics == want.diagnostics


@pytest.mark.parametrize(
    "name", ["fedmgda", "fedmgda_plus", "fedfv", "adafed", "fedlf", "qfedavg", "drfl"]
)
@given(seed=seeds, m=few)
@settings(max_examples=15)
def test_renaming_the_clients_changes_nothing_but_rounding(name: str, seed: int, m: int) -> None:
    rows, reports = fleet(seed, m)
    names = dict(
        zip(rows, np.random.default_rng(seed).permutation([f"x{k}" for k in range(m)]), strict=True)
    )
    renamed = {str(names[client]): row for client, row in rows.items()}
    want = step(rows, reports, name).step
    outcome = step(
        renamed, {str(names[client]): report for client, report in reports.items()}, name
    ).step
    np.testing.assert_allclose(outcome, want, rtol=1e-6, atol=1e-7 * np.linalg.norm(want))


@pytest.mark.parametrize("name", ["fedmgda", "fedfv", "adafed", "fedlf", "fedavg"])
@given(seed=seeds, factor=st.sampled_from([1e-8, 1e-4, 1e3, 1e6]))
@settings(max_examples=15)
def test_the_step_scales_with_the_updates(name: str, seed: int, factor: float) -> None:
    rows, reports = fleet(seed, 5)
    want = step(rows, reports, name).step * factor
    outcome = step({client: row * factor for client, row in rows.items()}, reports, name).step
    np.testing.assert_allclose(outcome, want, rtol=1e-6, atol=1e-7 * np.linalg.norm(want))


@given(seeds)
def test_norms_from_1e_minus_8_to_1e6_leave_a_common_descent_direction(seed: int) -> None:
    rows, reports = fleet(seed, 6, scale=False)
    scales = 10.0 ** np.linspace(-8, 6, 6)
    rows = {client: row * scale for (client, row), scale in zip(rows.items(), scales, strict=True)}
    for name in ("fedmgda", "fedmgda_plus", "adafed", "fedlf"):
        out = step(rows, reports, name)
        assert np.isfinite(out.step).all()
        assert out.diagnostics.conflicts == [], name


def test_fedlf_ignores_history_rows_that_are_too_old_or_too_new() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 40))
    gram = Gram(np.array([rows @ rows.T]))
    past = [PastRow("two", 8), PastRow("three", 7), PastRow("now", 10)]
    cohort = Cohort(
        gram, ["a", "b"], [Report(1, 1.0), Report(1, 2.0)], round=10, history=past, known_clients=4
    )
    chosen = recipe("fedlf").rule.step(cohort, None)
    assert chosen.notes["hist_used"] == ["two"]
    assert not chosen.coefficients[:, 3:].any()
