"""The owner's limit on epsilon: nothing leaves that would exceed it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.privacy import Allowance, PrivacyBudgetSpent, ReleaseLedger
from fairfleet.common.errors import UsageError
from fairfleet.common.privacy import PrivacyTerms, ReportTerms
from fairfleet.common.privacy_costs import gaussian_epsilon, report_cost, update_cost
from fairfleet.common.reports import Evaluation, TrainReport

REPORT = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=0.1)
NOISED = PrivacyTerms(clip=1.0, noise_multiplier=2.0)
COVERED = NOISED.model_copy(
    update={"reports": ReportTerms(noise_multiplier=4.0, loss_bound=5.0, gradient_bound=5.0)}
)
EVALUATION = Evaluation(samples=1, loss=1.0, accuracy=0.5)


def allowance(folder: Path, max_epsilon: float | None = None) -> Allowance:
    return Allowance(ReleaseLedger(folder), max_epsilon, 1e-5)


@given(
    limit=st.floats(0.5, 60.0),
    noises=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=40),
)
def test_a_server_that_requests_ever_more_cannot_exceed_the_limit(
    tmp_path_factory: pytest.TempPathFactory, limit: float, noises: list[float]
) -> None:
    owner = allowance(tmp_path_factory.mktemp("client"), limit)
    released = 0.0
    for number, noise in enumerate(noises):
        terms = NOISED.model_copy(update={"noise_multiplier": noise})
        try:
            owner.charge_update("f", number, f"{number:02x}", terms, REPORT)
            released += update_cost(noise)
        except PrivacyBudgetSpent:
            continue
    assert owner.ledger.total == pytest.approx(released)
    assert gaussian_epsilon(released, 1e-5) <= limit * (1 + 1e-9)


def test_the_limit_holds_over_restarts_and_federations(tmp_path: Path) -> None:
    limit = gaussian_epsilon(2 * update_cost(2.0), 1e-5) + 1e-6
    allowance(tmp_path, limit).charge_update("f", 0, "aa", NOISED, REPORT)
    allowance(tmp_path, limit).charge_update("g", 0, "bb", NOISED, REPORT)
    third = allowance(tmp_path, limit)
    with pytest.raises(PrivacyBudgetSpent, match="larger --max-epsilon"):
        third.require_update(NOISED)
    with pytest.raises(PrivacyBudgetSpent):
        third.charge_update("h", 0, "cc", NOISED, REPORT)
    third.charge_update("g", 0, "bb", NOISED, REPORT)  # the same bytes may be sent again
    allowance(tmp_path, 2 * limit).charge_update("h", 0, "cc", NOISED, REPORT)


def test_noised_reports_and_evaluations_are_charged_by_value(tmp_path: Path) -> None:
    owner = allowance(tmp_path, 100.0)
    with_norm = REPORT.model_copy(update={"gradient_norm": 1.0, "accuracy": 0.5})
    owner.charge_update("f", 0, "aa", COVERED, with_norm)
    cost = update_cost(2.0) + report_cost(4.0, 3)
    assert owner.ledger.total == pytest.approx(cost)
    owner.charge_evaluation("f", 1, EVALUATION, COVERED)
    assert owner.ledger.total == pytest.approx(cost + report_cost(4.0, 2))
    late = with_norm.model_copy(update={"initial_loss": 2.0})
    owner.charge_update("f", 1, "bb", COVERED, late)
    more = update_cost(2.0) + report_cost(4.0, 4)
    assert owner.ledger.total == pytest.approx(cost + report_cost(4.0, 2) + more)


def test_evaluations_that_are_equal_by_chance_are_all_charged(tmp_path: Path) -> None:
    """Noised values are cut to their range, so many of them are exactly 0 or 1."""
    cut = Evaluation(samples=1, loss=0.0, accuracy=1.0)
    for version in (5, 10, 10):  # measured again after a restart, with other noise
        allowance(tmp_path).charge_evaluation("f", version, cut, COVERED)
    assert allowance(tmp_path).ledger.total == pytest.approx(3 * report_cost(4.0, 2))


def test_what_is_sent_as_it_is_costs_no_epsilon_but_is_in_the_ledger(tmp_path: Path) -> None:
    owner = allowance(tmp_path, 1.0)
    for version in range(3):
        owner.charge_evaluation("f", version, EVALUATION, NOISED)
        owner.charge_trial("f", version)
    assert owner.ledger.total == 0
    assert owner.ledger.counts == {("f", "evaluation", False): 1, ("f", "trial", False): 1}


def test_a_loss_that_goes_beside_a_noised_update_is_listed(tmp_path: Path) -> None:
    for number in range(2):
        allowance(tmp_path).charge_update("f", number, f"{number}", NOISED, REPORT)
    assert allowance(tmp_path).ledger.counts == {
        ("f", "update", True): 2,
        ("f", "report", False): 1,
    }
    allowance(tmp_path).charge_update("g", 0, "0", COVERED, REPORT)
    assert ("g", "report", False) not in allowance(tmp_path).ledger.counts


def test_a_limit_without_the_ledger_of_earlier_work_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    allowance(tmp_path, 5.0)
    assert caplog.text == ""
    (tmp_path / "5d0c6a4e-0000-4000-8000-000000000000").mkdir()
    allowance(tmp_path)
    assert caplog.text == ""
    allowance(tmp_path, 5.0)
    assert "has no ledger of that" in caplog.text


def test_updates_without_noise_make_epsilon_infinite_and_are_refused_under_a_limit(
    tmp_path: Path,
) -> None:
    allowance(tmp_path).charge_update("f", 0, "aa", PrivacyTerms(), REPORT)
    allowance(tmp_path).charge_update("f", 1, "bb", PrivacyTerms(), REPORT)
    assert math.isinf(allowance(tmp_path).epsilon)
    other = tmp_path / "other"
    other.mkdir()
    limited = allowance(other, 5.0)
    with pytest.raises(UsageError, match=r"privacy\.where: client"):
        limited.require_update(PrivacyTerms())
    with pytest.raises(PrivacyBudgetSpent, match="infinite"):
        limited.charge_update("f", 0, "aa", PrivacyTerms(), REPORT)
    assert limited.ledger.total == 0
