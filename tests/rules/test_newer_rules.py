"""The theorems behind the newer rules and variants hold on random rounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.results import Outcome
from fairfleet.server.rules import Report, RuleError, listings, recipe
from fairfleet.server.rules.solvers.min_norm import min_norm_on_simplex
from fairfleet.server.rules.weights.fedga import gini_coefficient
from tests.support.samples.cohorts import Rows, fleet, seeds

few = st.integers(2, 9)


def step(rows: Rows, reports: dict[str, Report], name: str, **parameters: object) -> Outcome:
    """Aggregate one round with the rule of this name."""
    size = len(next(iter(rows.values())))
    return aggregate(np.zeros(size), rows, reports, recipe(name, **parameters))


def weights_of(reports: dict[str, Report], name: str, **parameters: object) -> np.ndarray:
    """Return the coefficients of a rule that reads reports only."""
    rows = dict(zip(reports, np.eye(len(reports)), strict=True))
    return step(rows, reports, name, **parameters).step


def numbers(reports: dict[str, Report]) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients' shares of samples and their losses."""
    samples = np.array([report.samples for report in reports.values()])
    return samples / samples.sum(), np.array([report.loss for report in reports.values()])


def random_simplex(seed: int, m: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(m), 50)


# --- FedMGDA: the box, preferences, MGDA-Prox ------------------------------------------------


@given(seeds, few, st.sampled_from(["uniform", "samples"]))
def test_fedmgda_with_epsilon_zero_is_fedavg(seed: int, m: int, prior: str) -> None:
    rows, reports = fleet(seed, m)
    boxed = step(rows, reports, "fedmgda", epsilon=0, lam0=prior).step
    plain = step(rows, reports, "fedavg", weighting=prior).step
    np.testing.assert_allclose(boxed, plain, rtol=1e-9, atol=1e-12)


@given(seeds, few, st.floats(0.0, 1.0), st.sampled_from(["uniform", "samples"]))
def test_fedmgda_is_the_shortest_combination_in_its_box(
    seed: int, m: int, epsilon: float, prior: str
) -> None:
    rows, reports = fleet(seed, m)
    out = step(rows, reports, "fedmgda", epsilon=epsilon, lam0=prior)
    p = numbers(reports)[0] if prior == "samples" else np.full(m, 1 / m)
    lam = np.asarray(out.diagnostics.notes["lam"])
    assert lam.sum() == pytest.approx(1.0)
    assert (np.abs(lam - p) <= epsilon + 1e-9).all()
    matrix = np.array(list(rows.values()))
    for candidate in random_simplex(seed, m):
        inside = p + (candidate - p) * min(1.0, epsilon / max(np.abs(candidate - p).max(), 1e-9))
        assert np.linalg.norm(inside @ matrix) >= np.linalg.norm(lam @ matrix) * (1 - 1e-9)


def test_a_smaller_epsilon_keeps_the_direction_nearer_to_the_mean() -> None:
    rows, reports = fleet(3, 6)
    mean = step(rows, reports, "fedavg", weighting="uniform").step
    away = [
        float(np.linalg.norm(step(rows, reports, "fedmgda", epsilon=epsilon).step - mean))
        for epsilon in (0, 0.05, 0.1, 0.5, 1)
    ]
    assert away == sorted(away)
    assert away[0] == pytest.approx(0.0, abs=1e-12)


@given(seeds, few)
def test_mgda_prox_is_fedmgda_plus_with_a_proximal_plan(seed: int, m: int) -> None:
    rows, reports = fleet(seed, m)
    np.testing.assert_array_equal(
        step(rows, reports, "mgda_prox").step, step(rows, reports, "fedmgda_plus").step
    )
    assert recipe("mgda_prox").plan == {"mu": 0.1}


@given(seeds, few, st.sampled_from(["fedmgda", "fedmgda_plus"]))
def test_no_loss_and_no_active_constraint_rises_along_the_preferred_direction(
    seed: int, m: int, name: str
) -> None:
    rows, reports = fleet(seed, m)
    clients = list(rows)
    vectors = [{"*": 1.0}, *({client: 1.0} for client in clients)]
    out = step(rows, reports, name, preferences=vectors)
    losses = numbers(reports)[1]
    chosen = np.full(m, m**-0.5)
    violated = [k for k in range(m) if (np.eye(m)[k] - chosen) @ losses > 0]
    assert set(out.diagnostics.notes["active"]) >= {k + 1 for k in violated}
    if out.diagnostics.status != "ok":
        return
    for row in rows.values():
        assert row @ out.step >= -1e-9 * np.linalg.norm(row) * np.linalg.norm(out.step)
    matrix = np.array(list(rows.values()))
    for k in violated:
        gradient = (np.eye(m)[k] - chosen) @ matrix
        assert gradient @ out.step > 0


def test_a_violated_constraint_is_lowered_first_where_no_direction_serves_all() -> None:
    rows = {"ann": np.array([1.0, 0.0]), "bob": np.array([-1.0, 0.0])}
    reports = {"ann": Report(1, 3.0), "bob": Report(1, 1.0)}
    out = step(rows, reports, "fedmgda", preferences="*:1|ann:1;bob:0")
    assert out.diagnostics.status == "constraints_only"
    assert rows["ann"] @ out.step > 0
    plain = step(rows, reports, "fedmgda")
    assert plain.diagnostics.status == "pareto_stationary"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"preferences": "ann:1"}, "found 1 preference vectors and chosen=0; expected at least"),
        ({"preferences": "*:1|ann:1", "chosen": 2}, "chosen=2"),
        ({"preferences": "*:1|ann"}, "'ann' is not a preference vector; expected vectors"),
        ({"preferences": "*:1|ann:-1"}, "a preference is negative"),
        ({"preferences": "*:1|ann:0"}, "no weight above 0"),
        ({"preferences": "*:1|ann:1", "epsilon": 0.5}, "weights near lam0 keep no constraint"),
    ],
)
def test_unusable_preferences_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError) as caught:
        recipe("fedmgda", **parameters)
    assert message in str(caught.value)


def test_preferences_are_compared_with_losses_of_zero_and_above_only() -> None:
    assert recipe("fedmgda").rule.needs().losses == "any"
    assert recipe("fedmgda_plus", preferences="*:1|a:1").rule.needs().losses == "non_negative"


# --- FedFV's orders --------------------------------------------------------------------------


def literal_fedfv(rows: Rows, order: list[str]) -> np.ndarray:
    """Project as the paper writes it, with these targets in this order, and alpha = 0."""
    total = np.zeros(len(next(iter(rows.values()))))
    for client, row in rows.items():
        p = row.copy()
        for target in order:
            if target != client and p @ rows[target] < 0:
                p -= p @ rows[target] / (rows[target] @ rows[target]) * rows[target]
        total += p / len(rows)
    mean = np.mean(list(rows.values()), axis=0)
    return total * np.linalg.norm(mean) / np.linalg.norm(total)


@given(seeds, few, st.sampled_from(["loss", "reverse", "random"]))
def test_fedfv_projects_in_the_chosen_order(seed: int, m: int, order: str) -> None:
    rows, reports = fleet(seed, m)
    targets = sorted(rows, key=lambda client: reports[client].loss)
    if order == "reverse":
        targets.reverse()
    out = step(rows, reports, "fedfv", alpha=0, order=order)
    if order == "random":
        clients = sorted(rows)
        targets = [clients[index] for index in out.diagnostics.notes["order"]]
        assert sorted(targets) == clients
    np.testing.assert_allclose(out.step, literal_fedfv(rows, targets), rtol=1e-6, atol=1e-9)


def test_fedfvs_random_order_changes_from_round_to_round_and_with_the_seed() -> None:
    rows, reports = fleet(0, 8)

    def order(number: int, seed: int) -> list[int]:
        chosen = recipe("fedfv", alpha=0, order="random", seed=seed)
        out = aggregate(np.zeros(40), rows, reports, chosen, round_number=number)
        return list(out.diagnostics.notes["order"])

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(number, seed)) for number in range(3) for seed in range(3)}) > 6


# --- FairGrad --------------------------------------------------------------------------------

ALPHAS = st.sampled_from([0.1, 0.5, 1.0, 2.0, 5.0, 20.0])


def utility(slopes: np.ndarray, alpha: float) -> float:
    return float(
        np.log(slopes).sum() if alpha == 1.0 else (slopes ** (1 - alpha)).sum() / (1 - alpha)
    )


@given(seeds, few, ALPHAS)
def test_fairgrad_lowers_each_loss_by_the_power_of_its_weight(
    seed: int, m: int, alpha: float
) -> None:
    rows, reports = fleet(seed, m)
    out = step(rows, reports, "fairgrad", alpha=alpha, length="literal")
    w = np.asarray(out.diagnostics.notes["w"])
    slopes = np.array([row @ out.step for row in rows.values()])
    assert (slopes > 0).all()
    np.testing.assert_allclose(slopes * w ** (1 / alpha), 1.0, rtol=1e-5)


@given(seeds, few, st.sampled_from([0.5, 1.0, 2.0]))
def test_no_direction_of_that_length_is_fairer_than_fairgrads(
    seed: int, m: int, alpha: float
) -> None:
    rows, reports = fleet(seed, m)
    d = step(rows, reports, "fairgrad", alpha=alpha).step
    matrix = np.array(list(rows.values()))
    mean = np.linalg.norm(matrix.mean(axis=0))
    assert np.linalg.norm(d) == pytest.approx(mean, rel=1e-9)
    best = utility(matrix @ d, alpha)
    rng = np.random.default_rng(seed)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        other = d + size * mean * rng.standard_normal(len(d)) / len(d) ** 0.5
        slopes = matrix @ (other * mean / np.linalg.norm(other))
        if (slopes > 0).all():
            assert utility(slopes, alpha) <= best + 1e-9 * abs(best)


@given(seeds, few)
def test_fairgrad_with_a_large_alpha_approaches_the_shortest_combination(seed: int, m: int) -> None:
    rows, reports = fleet(seed, m, scale=False)
    matrix = np.array(list(rows.values()))
    shortest = min_norm_on_simplex(matrix @ matrix.T).weights @ matrix

    def worst(alpha: float) -> float:
        d = step(rows, reports, "fairgrad", alpha=alpha).step
        return float((matrix @ d).min() / np.linalg.norm(d))

    best = float((matrix @ shortest).min() / np.linalg.norm(shortest))
    assert worst(0.5) <= worst(20.0) * (1 + 1e-9) <= best * (1 + 1e-6)
    assert worst(20.0) >= 0.8 * best


def test_fairgrad_of_scaled_updates_is_the_scaled_direction() -> None:
    rows, reports = fleet(5, 5)
    want = step(rows, reports, "fairgrad").step
    for factor in (1e-8, 1e6):
        scaled = step({client: row * factor for client, row in rows.items()}, reports, "fairgrad")
        np.testing.assert_allclose(scaled.step, want * factor, rtol=1e-6)


# --- Weights from losses ---------------------------------------------------------------------

REWEIGHTING = ["gifair", "semi_vred", "superquantile", "fedeba", "propfair"]


@pytest.mark.parametrize("name", REWEIGHTING)
@given(seed=seeds, m=few)
def test_weights_add_up_to_one_and_rise_with_the_loss(name: str, seed: int, m: int) -> None:
    _, reports = fleet(seed, m)
    p, losses = numbers(reports)
    weights = weights_of(reports, name, weighting="samples")
    assert weights.sum() == pytest.approx(1.0)
    share = (weights / p)[np.argsort(losses)]
    if name != "gifair":  # which adds to p, and does not multiply it
        assert (np.diff(share) >= -1e-9).all()
    else:
        assert (np.diff((weights - p)[np.argsort(losses)]) >= -1e-12).all()
        assert (weights >= 0).all()


@pytest.mark.parametrize("name", REWEIGHTING)
@given(seed=seeds, m=few)
@settings(max_examples=20)
def test_equal_losses_give_the_plain_mean(name: str, seed: int, m: int) -> None:
    _, reports = fleet(seed, m)
    equal = {client: Report(report.samples, 0.7) for client, report in reports.items()}
    p, _ = numbers(equal)
    np.testing.assert_allclose(weights_of(equal, name, weighting="samples"), p, rtol=1e-9)


def gradient(objective, losses: np.ndarray) -> np.ndarray:
    """Return the derivatives of a function of the losses, by finite differences."""
    unit = 1e-6 * np.eye(len(losses))
    return np.array([(objective(losses + e) - objective(losses - e)) / 2e-6 for e in unit])


@given(seeds, few, st.floats(0.0, 2.0), st.booleans())
def test_semi_vred_is_the_gradient_of_mean_and_semi_variance(
    seed: int, m: int, beta: float, one_sided: bool
) -> None:
    _, reports = fleet(seed, m)
    p, losses = numbers(reports)

    def objective(f: np.ndarray) -> float:
        excess = f - p @ f
        return float(p @ f + beta * p @ (np.maximum(excess, 0) if one_sided else excess) ** 2)

    got = weights_of(reports, "semi_vred", beta=beta, one_sided=one_sided)
    np.testing.assert_allclose(got, gradient(objective, losses), atol=1e-6)


@given(seeds, few, st.floats(0.0, 1.0))
def test_gifair_is_the_gradient_of_mean_and_pairwise_differences(
    seed: int, m: int, strength: float
) -> None:
    _, reports = fleet(seed, m)
    p, losses = numbers(reports)
    lam = strength * p.min() / (m - 1)

    def objective(f: np.ndarray) -> float:
        return float(p @ f + lam * np.abs(f[:, None] - f).sum() / 2)

    got = weights_of(reports, "gifair", strength=strength)
    np.testing.assert_allclose(got, gradient(objective, losses), atol=1e-6)
    assert (got >= 0).all()


@given(seeds, few, st.floats(0.5, 4.0))
def test_propfair_is_the_gradient_of_the_log_utilities(seed: int, m: int, above: float) -> None:
    _, reports = fleet(seed, m)
    p, losses = numbers(reports)
    baseline = losses.max() + above
    got = weights_of(reports, "propfair", baseline=baseline, scale="literal")
    want = gradient(lambda f: float(-(p @ np.log(baseline - f))), losses)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@given(seeds, few, st.floats(0.05, 1.0))
def test_the_superquantile_is_the_largest_mean_that_its_bounds_allow(
    seed: int, m: int, theta: float
) -> None:
    _, reports = fleet(seed, m)
    p, losses = numbers(reports)
    weights = weights_of(reports, "superquantile", theta=theta)
    assert (weights <= p / theta + 1e-9).all()
    for candidate in random_simplex(seed, m):
        reach = np.where(candidate > p, (p / theta - p) / np.maximum(candidate - p, 1e-12), np.inf)
        inside = p + (candidate - p) * min(1.0, float(reach.min()))
        assert inside @ losses <= weights @ losses + 1e-9


def test_the_superquantile_goes_from_the_mean_to_the_worst_client() -> None:
    _, reports = fleet(1, 6)
    p, losses = numbers(reports)
    np.testing.assert_allclose(weights_of(reports, "superquantile", theta=1), p)
    worst = np.eye(6)[losses.argmax()]
    np.testing.assert_allclose(weights_of(reports, "superquantile", theta=1e-3), worst)


@given(seeds, few, st.floats(0.05, 5.0))
def test_fedeba_has_the_largest_entropy_for_its_loss(seed: int, m: int, tau: float) -> None:
    _, reports = fleet(seed, m)
    losses = numbers(reports)[1]
    weights = weights_of(reports, "fedeba", tau=tau)

    def value(w: np.ndarray) -> float:
        positive = w[w > 0]
        return float(w @ losses - tau * (positive * np.log(positive)).sum())

    assert all(value(candidate) <= value(weights) + 1e-9 for candidate in random_simplex(seed, m))


@pytest.mark.parametrize("name", ["gifair", "semi_vred", "superquantile", "fedeba"])
@given(seed=seeds, offset=st.floats(-100, 100))
@settings(max_examples=20)
def test_a_constant_added_to_all_losses_changes_nothing(
    name: str, seed: int, offset: float
) -> None:
    _, reports = fleet(seed, 5)
    moved = {
        client: Report(report.samples, report.loss + offset) for client, report in reports.items()
    }
    np.testing.assert_allclose(weights_of(moved, name), weights_of(reports, name), rtol=1e-6)


# --- FedGA -----------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9))
def test_the_gini_coefficient_is_the_mean_relative_difference(values: list[float]) -> None:
    array = np.array(values)
    want = np.abs(array[:, None] - array).sum() / (2 * len(array) ** 2 * array.mean())
    assert gini_coefficient(array) == pytest.approx(want, abs=1e-12)


def fedga_rounds(accuracies: list[float], lengths: list[float]) -> list[np.ndarray]:
    """Return the weights of consecutive rounds with updates of these lengths."""
    chosen, state, taken = recipe("fedga"), None, []
    for size in lengths:
        rows = {f"c{k}": size * row for k, row in enumerate(np.eye(len(accuracies)))}
        reports = {f"c{k}": Report(1, 1.0, accuracy=a) for k, a in enumerate(accuracies)}
        out = aggregate(np.zeros(len(accuracies)), rows, reports, chosen, state=state)
        state = out.state
        taken.append(out.step / size)
    return taken


def test_fedga_waits_for_updates_to_settle_and_then_stays_fair() -> None:
    first, still_long, settled, long_again = fedga_rounds([0.9, 0.3], [1.0, 0.8, 0.4, 1.0])
    np.testing.assert_allclose([first, still_long], 0.5)
    assert settled[1] > 0.55
    np.testing.assert_allclose(long_again, settled)


def test_fedga_leaves_equal_accuracies_alone() -> None:
    np.testing.assert_allclose(fedga_rounds([0.6, 0.6], [1.0, 0.1]), 0.5)


# --- FedAMSGrad ------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=20)
def test_fedamsgrads_rates_never_grow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen, state, largest = recipe("fedamsgrad", beta1=0, eta=1), None, np.zeros(6)
    for _ in range(6):
        row = rng.standard_normal(6) * 10 ** rng.uniform(-2, 1)
        out = aggregate(np.zeros(6), {"ann": row}, {"ann": Report(1, 1.0)}, chosen, state=state)
        state = out.state
        roots = row / out.step  # sqrt(h) + tau
        assert (roots >= largest * (1 - 1e-6)).all()
        largest = roots


def test_every_newer_rule_is_listed_with_its_parameters() -> None:
    for name in [*REWEIGHTING, "fairgrad", "fedga", "fedamsgrad"]:
        assert listings()[name].line()
        assert listings()[name].parameters()


@given(seeds)
@settings(max_examples=30)
def test_fairgrad_takes_norms_from_1e_minus_8_to_1e6(seed: int) -> None:
    rows, reports = fleet(seed, 6, scale=False)
    scales = 10.0 ** np.linspace(-8, 6, 6)
    rows = {client: row * scale for (client, row), scale in zip(rows.items(), scales, strict=True)}
    out = step(rows, reports, "fairgrad")
    assert np.isfinite(out.step).all()
    assert out.diagnostics.conflicts == []
