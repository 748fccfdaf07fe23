"""Admission as a pure function: its changes, its bounds, and values that it never changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as configured
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fairfleet.server.aggregation.admission import (
    RECENT_LOSSES,
    AdmissionContext,
    AdmissionDecision,
    AdmissionSettings,
    LossHistory,
    ReportedValues,
    judge,
)
from fairfleet.server.aggregation.aggregator import Aggregation, aggregate
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.leave_one_out import (
    LEAST_SPREAD,
    Vector,
    medians_of_others,
    spreads_of_others,
)
from fairfleet.server.rules import Report, listings, recipe
from tests.support.samples.cohorts import Rows, fleet, seeds

pytestmark = pytest.mark.filterwarnings("error")

RECOMMENDED = AdmissionSettings(norm="clip", loss="winsorise", samples="cap")
STRICT = AdmissionSettings(norm="reject", loss="reject", samples="cap")
values = st.floats(0, 1e300)
cohorts = st.integers(1, 9).flatmap(
    lambda many: st.tuples(*(arrays(np.float64, many, elements=values) for _ in range(3)))
)
pasts = st.none() | st.lists(values, min_size=1, max_size=5)


def claims(
    norms: Vector, losses: Vector, samples: Vector, recent: Sequence[Sequence[float]] = ()
) -> ReportedValues:
    return ReportedValues([f"c{k}" for k in range(len(norms))], norms, losses, samples, recent)


def gate(settings: AdmissionSettings, start: Sequence[float] | None = None) -> AdmissionContext:
    return AdmissionContext(settings, LossHistory(start or ()))


def of_losses(
    *losses: float, past: Sequence[Sequence[float]] = (), start: float | None = None
) -> AdmissionDecision:
    ones = np.ones(len(losses))
    begun = gate(RECOMMENDED, None if start is None else [start])
    return judge(claims(ones, np.array(losses), ones, past), begun)


@given(arrays(np.float64, st.integers(2, 9), elements=st.floats(-1e6, 1e6)))
def test_each_client_is_compared_with_the_others_only(values: Vector) -> None:
    medians = medians_of_others(values)
    spreads = spreads_of_others(values, medians)
    for index in range(len(values)):
        others = np.delete(values, index)
        median = medians[index]
        assert median == pytest.approx(np.median(others))
        deviation = 1.4826 * np.median(np.abs(others - median))
        assert spreads[index] == pytest.approx(max(deviation, LEAST_SPREAD * abs(median)))


@given(cohorts, pasts, st.sampled_from([RECOMMENDED, STRICT]), st.randoms())
def test_the_order_of_clients_makes_no_difference(
    found: tuple[Vector, ...], start: list[float] | None, settings: AdmissionSettings, random: Any
) -> None:
    in_order = judge(claims(*found), gate(settings, start))
    order = list(range(len(found[0])))
    random.shuffle(order)
    mixed = judge(claims(*(values[order] for values in found)), gate(settings, start))
    for part in ("factors", "losses", "samples", "rejected"):
        np.testing.assert_array_equal(getattr(in_order, part)[order], getattr(mixed, part))
    assert len(in_order.findings) == len(mixed.findings)


@given(cohorts, pasts)
def test_observing_changes_nothing_and_reports_what_enforcing_would_do(
    found: tuple[Vector, ...], start: list[float] | None
) -> None:
    seen, done = (
        judge(claims(*found), gate(settings, start))
        for settings in (AdmissionSettings(), RECOMMENDED)
    )
    np.testing.assert_array_equal(seen.factors, 1.0)
    np.testing.assert_array_equal(seen.losses, found[1])
    np.testing.assert_array_equal(seen.samples, found[2])
    assert not seen.rejected.any()
    assert {finding.decision for finding in seen.findings} <= {"observed"}
    assert [replace(finding, decision="observed") for finding in done.findings] == list(
        seen.findings
    )


@given(
    st.integers(1, 20).flatmap(
        lambda many: arrays(np.float64, (3, many), elements=st.floats(1.0, 1.4))
    ),
    st.floats(1e-9, 1e9),
)
def test_a_fleet_of_similar_honest_clients_is_never_changed(alike: Vector, scale: float) -> None:
    for settings in (RECOMMENDED, STRICT):
        assert judge(claims(*(scale * alike)), gate(settings)).findings == ()


@configured(max_examples=40)
@given(cohorts, pasts, st.lists(pasts.map(lambda past: past or []), min_size=9, max_size=9))
@example(
    (np.array([5.181947329472012e299, 2.0**-52, 2.0**-52]), np.zeros(3), np.zeros(3)),
    None,
    [[]] * 9,
)
def test_the_influence_of_any_update_is_bounded_by_the_others(
    found: tuple[Vector, ...], start: list[float] | None, recent: list[list[float]]
) -> None:
    norms = found[0]
    passed = judge(claims(*found, recent[: len(norms)]), gate(RECOMMENDED, start))
    for part in (passed.factors, passed.losses, passed.samples):
        assert np.isfinite(part).all()
    if len(norms) < 3:
        assert passed.findings == ()
        return
    untrained = 1.5 * float(np.median(start)) if start else 0.0
    for index in range(len(norms)):
        others = [np.delete(values, index) for values in found]
        length, loss, count = (float(np.median(values)) for values in others)
        if length > 0:
            assert passed.factors[index] * norms[index] <= 3 * length * (1 + 1e-9)
        if count > 0:
            assert passed.samples[index] <= 10 * count * (1 + 1e-9)
        fence = loss + 5 * max(1.4826 * float(np.median(np.abs(others[1] - loss))), 0.1 * loss)
        assert passed.losses[index] <= max(fence, untrained) * (1 + 1e-9)


@given(cohorts, pasts)
def test_at_least_half_of_a_round_is_never_rejected(
    found: tuple[Vector, ...], start: list[float] | None
) -> None:
    judged = judge(claims(*found), gate(STRICT, start))
    assert 2 * np.count_nonzero(judged.rejected) <= len(found[0])


def test_contradicting_checks_reject_no_client_but_bound_all() -> None:
    norms, losses = np.array([1.0, 1.0, 99.0, 99.0, 1.0]), np.array([9.0, 1.0, 1.0, 1.0, 9.0])
    judged = judge(claims(norms, losses, np.ones(5)), gate(STRICT))
    assert not judged.rejected.any()
    assert {finding.decision for finding in judged.findings} == {"clipped", "winsorised"}


def test_too_few_updates_are_not_judged() -> None:
    zeros = np.zeros(4)
    assert judge(claims(zeros, zeros, zeros), gate(STRICT)).findings == ()
    one_trains = judge(
        claims(np.array([0, 0, 0, 5.0]), zeros, np.array([0, 0, 0, 7.0])), gate(STRICT)
    )
    assert one_trains.findings == ()
    pair = judge(
        claims(np.array([1.0, 1000]), np.array([1.0, 1000]), np.array([1.0, 1000])), gate(STRICT)
    )
    assert pair.findings == ()  # with two updates, neither is the unusual one


# ---- losses: the exceptions that protect honest minorities ---------------------------------------


def test_a_minority_that_was_always_served_worse_is_accepted() -> None:
    past = [[0.4] * 5, [0.4] * 5, [0.4] * 5, [2.2, 2.1, 2.1, 2.0, 2.0]]
    assert of_losses(0.3, 0.3, 0.3, 2.0, past=past, start=2.3).findings == ()


def test_a_newcomer_with_the_loss_of_an_untrained_model_is_accepted() -> None:
    assert of_losses(0.3, 0.3, 0.3, 2.4, past=[[0.4] * 5] * 3 + [[]], start=2.3).findings == ()


def test_a_loss_unusual_for_its_client_and_the_fleet_is_not_accepted() -> None:
    judged = of_losses(0.3, 0.3, 0.3, 2.0, past=[[0.4] * 5] * 4, start=2.3)
    assert [(finding.client, finding.check, finding.decision) for finding in judged.findings] == [
        ("c3", "loss", "winsorised")
    ]
    assert judged.losses[3] == 0.3


def test_a_repeated_false_loss_is_not_accepted() -> None:
    past = [[0.4] * 5] * 3 + [[400.0] * 5]
    assert of_losses(0.3, 0.3, 0.3, 400.0, past=past, start=2.3).losses[3] == 0.3
    assert (
        of_losses(0.3, 0.3, 0.3, 3.4, past=past, start=2.3).losses[3] == 3.4
    )  # indistinguishable from a minority


def test_in_the_first_round_only_the_fleet_is_compared() -> None:
    assert of_losses(2.3, 2.3, 2.3, 23.0).losses[3] == 2.3
    assert of_losses(2.3, 2.2, 2.4, 3.4).findings == ()


def test_recent_and_first_losses_are_stored_as_reported() -> None:
    watched = LossHistory()
    for number in range(RECENT_LOSSES + 2):
        watched.committed({"ann": 1.0 + number, "liar": 1000.0})
    assert watched.start == 500.5
    assert watched.recent("ann") == (3.0, 4.0, 5.0, 6.0, 7.0)
    assert (again := LossHistory.load(watched.dump())).start == watched.start
    assert again.recent("liar") == watched.recent("liar")


# ---- in the aggregation --------------------------------------------------------------------------

LAYERS = [15, 25]
few_examples = configured(max_examples=8)  # of each rule


def direction(
    rows: Rows, reports: dict[str, Report], rule: str, settings: AdmissionSettings, **more: Any
) -> np.ndarray:
    out = aggregate(
        np.zeros(40),
        rows,
        reports,
        recipe(rule),
        layers=LAYERS,
        admission=AdmissionContext(settings),
        **more,
    )
    return out.step


@pytest.mark.parametrize("rule", sorted(listings()))
@few_examples
@given(seed=seeds)
def test_a_clipped_update_counts_like_a_shorter_one(rule: str, seed: int) -> None:
    rows, reports = fleet(seed, 6, scale=False)
    rows["client 003"] *= 1000.0
    lengths = np.array([np.linalg.norm(row) for row in rows.values()])
    shorter = rows | {
        "client 003": rows["client 003"] * 3 * np.median(np.delete(lengths, 3)) / lengths[3]
    }
    clipped_direction = direction(
        rows, reports, rule, AdmissionSettings(norm="clip", loss="off", samples="off")
    )
    expected = direction(
        shorter, reports, rule, AdmissionSettings(norm="off", loss="off", samples="off")
    )
    np.testing.assert_allclose(
        clipped_direction, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max()
    )


@pytest.mark.parametrize("rule", sorted(listings()))
@few_examples
@given(seed=seeds)
def test_a_rejected_update_counts_like_a_missing_one(rule: str, seed: int) -> None:
    rows, reports = fleet(seed, 6, scale=False)
    losses = np.random.default_rng(seed).uniform(1.0, 1.4, 6).tolist()
    reports = {
        client: replace(report, loss=loss)
        for (client, report), loss in zip(reports.items(), losses, strict=True)
    }
    reports["client 002"] = replace(reports["client 002"], loss=1000.0)
    rejected_direction = direction(
        rows, reports, rule, AdmissionSettings(norm="off", loss="reject", samples="off")
    )
    rest = {client: row for client, row in rows.items() if client != "client 002"}
    np.testing.assert_array_equal(
        rejected_direction, direction(rest, reports, rule, AdmissionSettings())
    )


@pytest.mark.parametrize("rule", sorted(listings()))
@few_examples
@given(seed=seeds)
def test_observing_does_not_change_a_bit_of_the_step(rule: str, seed: int) -> None:
    rows, reports = fleet(seed, 5)
    reports["client 001"] = replace(reports["client 001"], loss=500.0)
    off = AdmissionSettings(norm="off", loss="off", samples="off")
    np.testing.assert_array_equal(
        direction(rows, reports, rule, AdmissionSettings()), direction(rows, reports, rule, off)
    )


def test_stand_in_rows_are_judged_by_the_limits_of_the_round() -> None:
    rows, reports = fleet(1, 4, scale=False)
    absent = (
        rows["client 000"] * 1e6
    )  # it may have come too late for a round that would have judged it
    steps = []
    for factor, settings in itertools.product((1.0, 1e-3), (RECOMMENDED, AdmissionSettings())):
        history = History(LAYERS, precision="float64")
        history.put("absent", 6, absent * factor, loss=1e9, samples=1e9)
        out = Aggregation(
            recipe("fedfv", tau=3),
            LAYERS,
            round_number=7,
            history=history,
            admission=AdmissionContext(settings),
        )
        out.extend({client: rows[client] for client in ("client 001", "client 002", "client 003")})
        direction = out.direction(reports)
        (row,) = direction.cohort.history
        steps.append((direction, row))
    (clipped, row), (raw, as_sent), (half, _), _ = steps
    lengths = [np.linalg.norm(rows[f"client 00{k}"]) for k in (1, 2, 3)]
    assert clipped.cohort.gram.norms[-1] == pytest.approx(3 * np.median(lengths))
    assert raw.cohort.gram.norms[-1] == pytest.approx(np.linalg.norm(absent))
    assert (row.loss, row.samples) != (1e9, 1e9) == (as_sent.loss, as_sent.samples)
    np.testing.assert_allclose(
        clipped.vector, half.vector, rtol=1e-6
    )  # its size made no difference
    assert {finding.check for finding in clipped.admitted.findings if finding.stood_in} == {
        "norm",
        "loss",
        "samples",
    }


def test_the_last_good_row_stands_in_for_a_rejected_client() -> None:
    rows, reports = fleet(2, 4, scale=False)
    history = History(LAYERS, precision="float64")
    good = rows["client 000"].copy()
    for client in rows:
        history.put(client, 6, rows[client], loss=1.0, samples=10)
    history.put("elsewhere", 6, rows["client 001"], loss=1.0, samples=10)
    rows["client 000"] = rows["client 000"] * 1e6
    settings = AdmissionSettings(norm="reject")
    out = Aggregation(
        recipe("fedlf"),
        LAYERS,
        round_number=7,
        history=history,
        expected=list(rows),
        admission=AdmissionContext(settings),
    )
    out.extend(rows)
    step = out.step(reports)
    assert list(step.reports) == ["client 001", "client 002", "client 003"]
    assert "client 000" in step.diagnostics.history_coefficients
    out.remember({client: rows[client] for client in step.reports}, reports)
    np.testing.assert_array_equal(history.row("client 000"), good)
    assert history.rows()["client 000"].round == 6
