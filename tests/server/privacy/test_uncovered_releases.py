"""Releases with less privacy than is required now: they are refused or named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairfleet.common.errors import UsageError, WrongState
from fairfleet.common.privacy import PrivacyTerms
from fairfleet.common.privacy_costs import report_cost
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.rounds.state_machine import ModelStored, Phase, Round
from fairfleet.server.storage.store import StoredUpdate
from tests.support.samples.privacy import (
    CLIENT,
    NOISED,
    REPORT,
    SERVER,
    UNIFORM,
    announce,
    new_store,
)


def test_a_federation_that_began_without_privacy_is_refused(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    round_0, stored = Round(0, Phase.AGGREGATING), ModelStored(1)
    store.record([(round_0, stored, Round(1))], Round(1), lambda c: None)
    with store._engine.begin() as connection:
        connection.exec_driver_sql(
            "insert into rounds (round, record) values (0, '{\"round\": 0}')"
        )
    with pytest.raises(UsageError, match="without privacy at the client, which no epsilon covers"):
        PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_updates_without_noise_are_not_counted_as_noised(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.write(store.update_write(StoredUpdate(0, "ann", bytes(32), "raw32", 1, REPORT, "file")))
    with pytest.raises(UsageError, match="without privacy at the client, which no epsilon covers"):
        PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_updates_noised_by_the_server_only_are_not_counted_as_noised_by_clients(
    tmp_path: Path,
) -> None:
    """Their noised reports are recorded; the updates themselves are not."""
    store = new_store(tmp_path)
    trusted = PrivacyBudget(store, PrivacySettings(**SERVER, reports="noised"), UNIFORM)
    announce(trusted, "ann", 0, bytes(32), PrivacyTerms(reports=NOISED.reports))
    assert trusted.spent.direct == report_cost(2.0, 1)
    store.write(store.update_write(StoredUpdate(0, "ann", bytes(32), "raw32", 1, REPORT, "file")))
    with pytest.raises(UsageError, match="without privacy at the client, which no epsilon covers"):
        PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_rounds_noised_by_the_server_are_not_counted_as_private_at_the_client(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path)
    with store._engine.begin() as connection:
        record = json.dumps({"round": 0, "privacy": {"where": "server", "drawn": False}})
        connection.exec_driver_sql("insert into rounds (round, record) values (0, ?)", (record,))
    PrivacyBudget(store, PrivacySettings(**SERVER), UNIFORM)
    with pytest.raises(UsageError, match="without privacy at the client"):
        PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


@pytest.mark.parametrize(
    ("applied", "words"),
    [
        (PrivacyTerms(), "was not clipped, not to 1 as this server now requires"),
        (PrivacyTerms(clip=1.0), "has noise of 0 times its clip, not 2"),
        (PrivacyTerms(clip=1.0, noise_multiplier=1.9), "has noise of 1.9 times its clip, not 2"),
        (PrivacyTerms(clip=1.1, noise_multiplier=2.0), "was clipped to 1.1, not to 1"),
    ],
)
def test_an_update_with_less_privacy_than_now_required_is_refused(
    tmp_path: Path, applied: PrivacyTerms, words: str
) -> None:
    store = new_store(tmp_path)
    with pytest.raises(WrongState, match=words):
        PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM).refuse_weaker_update(
            "ann", applied
        )
    # With noise at the server, nothing is required of clients.
    PrivacyBudget(store, PrivacySettings(**SERVER), UNIFORM).refuse_weaker_update("ann", applied)
    store.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (None, "was reported without noise"),
        ({"noise_multiplier": 1.9}, "was reported with noise of 1.9 times each bound, not 2"),
        ({"loss_bound": 6.0}, "with bounds of 6 and 5 for loss and gradient norm, not 5 and 5"),
        ({"gradient_bound": 6.0}, "with bounds of 5 and 6"),
    ],
)
def test_reports_with_less_privacy_than_now_required_are_refused(
    tmp_path: Path, fields: dict[str, float] | None, words: str
) -> None:
    store = new_store(tmp_path)
    budget = PrivacyBudget(
        store, PrivacySettings(**CLIENT, reports="noised", report_noise=2.0), UNIFORM
    )
    assert NOISED.reports is not None
    reports = None if fields is None else NOISED.reports.model_copy(update=fields)
    applied = NOISED.model_copy(update={"reports": reports})
    for refuse in (budget.refuse_weaker_update, budget.refuse_weaker_evaluation):
        refuse("ann", NOISED)
        with pytest.raises(WrongState, match=words):
            refuse("ann", applied)
    store.close()


def test_reports_before_noising_began_are_listed_as_not_covered(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path)
    plain, noised = PrivacySettings(**CLIENT), PrivacySettings(**CLIENT, reports="noised")

    def not_covered(privacy: PrivacySettings) -> str:
        return PrivacyBudget(store, privacy, UNIFORM).status().not_covered

    assert "before round" not in not_covered(noised)
    assert "before round" not in not_covered(plain)
    announce(PrivacyBudget(store, plain, UNIFORM), "ann", 0, bytes(32))
    store.write(store.update_write(StoredUpdate(0, "ann", bytes(32), "raw32", 1, REPORT, "file")))
    for _ in range(2):
        assert not_covered(noised).endswith("; nor what was reported before round 2")
    store.close()
