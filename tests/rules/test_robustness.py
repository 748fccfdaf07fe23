"""For all finite numbers that clients send, a rule gives a finite step or refuses.

A constant added to all losses never makes a rule favour the better client.
"""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.rules import Report, RuleError, UnusableReport, listings, optimizer, recipe
from fairfleet.server.rules.optimizers import OPTIMIZERS

pytestmark = pytest.mark.slow

BUILT_IN = sorted(listings())
D, LAYERS = 6, [2, 3, 1]
VALUES = [0.0, 1e-45, -1e-45, 1e-30, 1.0, -1.0, 0.3, 1e20, -1e20, 3.4e38, -3.4e38]
LARGE = 1.7e308


def reports(
    losses: list[float], samples: list[float], norms: list[float], rates: list[float]
) -> st.SearchStrategy:
    """Draw reports with these values."""
    return st.builds(
        Report,
        samples=st.sampled_from(samples),
        loss=st.sampled_from(losses),
        first_loss=st.sampled_from(losses),
        accuracy=st.sampled_from([0.0, 0.5, 1.0]),
        participations=st.sampled_from([1.0, 5.0, 1e9]),
        steps=st.sampled_from([0.0, 1.0, 1e9]),
        gradient_norm=st.sampled_from(norms),
        local_lr=st.sampled_from(rates),
    )


POSITIVE = [1e-300, 1e-12, 0.5, 2.0, 1e30, LARGE]
defined = reports(
    [0.0, *POSITIVE], [1.0, 7.0, 2.0**53], [0.0, 1e-300, 1.0, LARGE], [1e-300, 0.1, 1e300]
)
usual = reports([0.1, 0.5, 2.0], [1.0, 7.0], [0.5, 1.0], [0.1])
extreme = reports([*POSITIVE, -1.0, -LARGE], [0.0, 1.0], [0.0, LARGE], [0.0, 0.1])
rows = st.one_of(
    st.sampled_from(VALUES).map(lambda value: np.full(D, value, np.float32)),
    st.lists(st.sampled_from(VALUES), min_size=D, max_size=D).map(
        lambda values: np.array(values, np.float32)
    ),
)
cohorts = st.one_of(
    [
        st.lists(st.tuples(rows, drawn), min_size=1, max_size=5)
        for drawn in (usual, defined, extreme)
    ]
)


def assert_finite_or_refused(
    name: str, after: str | None, cohort: list[tuple[np.ndarray, Report]]
) -> None:
    """Run two rounds, and check all numbers that come out unless the rule raises RuleError."""
    named = {f"c{k}": member for k, member in enumerate(cohort)}
    chosen = recipe(name, optimizer(after)) if after else recipe(name)
    model, state = np.zeros(D, np.float32), None
    for number in range(2):
        try:
            out = aggregate(
                model,
                {client: row for client, (row, _) in named.items()},
                {client: report for client, (_, report) in named.items()},
                chosen,
                state=state,
                layers=LAYERS,
                round_number=number,
            )
        except RuleError:
            return
        assert np.isfinite(out.step).all()
        state = out.state
        assert state.rule is not None
        assert state.optimizer is not None
        assert type(state.rule).model_validate_json(state.rule.model_dump_json()) == state.rule
        assert all(np.isfinite(vector).all() for vector in state.optimizer.vectors.values())
        assert np.isfinite(list(state.optimizer.numbers.values())).all()


# Diagnostics and combinations may warn about overflows; their results are checked.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BUILT_IN)
@given(cohort=cohorts)
@settings(max_examples=100)
def test_every_rule_gives_a_finite_step_or_refuses(
    name: str, cohort: list[tuple[np.ndarray, Report]]
) -> None:
    assert_finite_or_refused(name, None, cohort)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("after", sorted(OPTIMIZERS))
@given(cohort=cohorts)
@settings(max_examples=100)
def test_every_optimizer_gives_a_finite_step_or_refuses(
    after: str, cohort: list[tuple[np.ndarray, Report]]
) -> None:
    assert_finite_or_refused("fedavg", after, cohort)


def test_fedfv_does_not_project_off_an_update_of_almost_zero() -> None:
    updates = {"ann": np.ones(4, np.float32), "bob": np.full(4, -1e-45, np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = aggregate(
            np.zeros(4, np.float32),
            updates,
            {client: Report(1, 1.0) for client in updates},
            recipe("fedfv"),
        )
    assert out.step == pytest.approx(np.full(4, 0.5))


def decreases(name: str, offset: float, gap: float) -> tuple[float, float]:
    """Return how far the step lowers the loss of the better and of the worse of two clients.

    Their updates are orthogonal; their losses are `offset` and `offset` + `gap`.
    """
    updates = {"better": np.array([1.0, 0.0]), "worse": np.array([0.0, 1.0])}
    reported = {
        client: Report(10, loss + offset, 1.0, 0.5, 2, 5, 1.0, 0.1)
        for client, loss in (("better", 0.0), ("worse", gap))
    }
    out = aggregate(np.zeros(2), updates, reported, recipe(name))
    return float(updates["better"] @ out.step), float(updates["worse"] @ out.step)


@pytest.mark.parametrize("name", BUILT_IN)
@given(offset=st.floats(-1e6, 1e6), gap=st.floats(0.01, 1e3))
@settings(max_examples=40)
def test_the_worse_client_is_never_served_less_unless_its_losses_are_refused(
    name: str, offset: float, gap: float
) -> None:
    if recipe(name).rule.needs().losses != "any" and offset < 0.0:
        with pytest.raises(UnusableReport, match="from better"):
            decreases(name, offset, gap)
        return
    better, worse = decreases(name, offset, gap)
    # Krum takes one of the two, whatever their losses.
    assert worse >= better * (1.0 - 1e-6) or name == "krum"


@pytest.mark.parametrize("name", ["adafed", "adafedadam", "drfl", "fedlf", "fedmdfg", "qfedavg"])
def test_a_negative_loss_is_refused_with_the_clients_name_and_a_remedy(name: str) -> None:
    with pytest.raises(
        UnusableReport, match=r"loss of -3 from better; expected zero or above\. Add a constant"
    ):
        decreases(name, -3.0, 4.0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("adafed", {"gamma": 0}),
        ("adafedadam", {"alpha": 0}),
        ("drfl", {"q": 0}),
        ("qfedavg", {"q": 0}),
        ("fedlf", {"use_p": False}),
    ],
)
def test_a_rule_whose_parameters_ignore_the_losses_accepts_any_loss(
    name: str, parameters: dict[str, float]
) -> None:
    assert recipe(name).rule.needs().losses == "non_negative"
    assert recipe(name, **parameters).rule.needs().losses == "any"


def test_qfedavg_needs_positive_losses_where_it_divides_by_them() -> None:
    assert recipe("qfedavg", q=0.5, loss_eps=0.0).rule.needs().losses == "positive"
    assert recipe("qfedavg", q=0.5).rule.needs().losses == "non_negative"


@pytest.mark.parametrize("name", ["qfedavg", "adafedadam"])
def test_a_learning_rate_of_zero_is_refused_where_the_rule_divides_by_it(name: str) -> None:
    updates = {"ann": np.ones(2), "bob": np.ones(2)}
    reported = {"ann": Report(1, 1.0, 1.0, gradient_norm=1.0, local_lr=0.1)}
    reported["bob"] = Report(1, 1.0, 1.0, gradient_norm=1.0, local_lr=0.0)
    with pytest.raises(
        UnusableReport, match="local_lr of 0 from bob; expected above zero"
    ) as caught:
        aggregate(np.zeros(2), updates, reported, recipe(name))
    assert caught.value.clients == ("bob",)


def test_an_error_is_raised_if_all_clients_report_zero_samples() -> None:
    with pytest.raises(RuleError, match=r"add up to 0\.0"):
        aggregate(np.zeros(2), {"ann": np.ones(2)}, {"ann": Report(0, 1.0)}, recipe("fedavg"))
