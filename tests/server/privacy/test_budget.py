"""The privacy budget: every release is spent once and permanently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.common.errors import WrongState
from fairfleet.common.privacy import PrivacyTerms
from fairfleet.common.privacy_costs import report_cost, update_cost
from fairfleet.common.reports import Evaluation
from fairfleet.server.privacy.accountant import PrivacySpent, epsilon
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.privacy.release_queries import MOST_RELEASES
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.rules import recipe
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


def test_every_announced_update_is_spent_once_and_permanently(tmp_path: Path) -> None:
    privacy = PrivacySettings(**CLIENT)
    store = new_store(tmp_path)
    budget = PrivacyBudget(store, privacy, UNIFORM)
    assert budget.epsilon() == 0.0
    announce(budget, "ann", 0, b"1")
    announce(budget, "ann", 0, b"1")  # It is sent again after a broken connection.
    single = budget.epsilon()
    assert single == epsilon(PrivacySpent(update_cost(2.0)), 1e-5)
    announce(budget, "bob", 0, b"2")
    assert budget.epsilon() == single  # Epsilon is that of the client with the largest total.
    announce(budget, "ann", 0, b"3")  # It trained again after losing its update: two releases.
    assert budget.epsilon() == epsilon(PrivacySpent(2 * update_cost(2.0)), 1e-5)
    budget.committed(["ann", "bob"], None)
    assert budget.commit_writes(0, ["ann", "bob"], None) == []
    before = budget.epsilon()
    store.close()
    store = new_store(tmp_path)
    assert PrivacyBudget(store, privacy, UNIFORM).epsilon() == before
    # More noise does not improve past releases.
    louder = PrivacySettings(**CLIENT | {"noise_multiplier": 50.0})
    assert PrivacyBudget(store, louder, UNIFORM).epsilon() == before
    store.close()


def test_with_noise_at_the_server_participants_spend_committed_rounds_only(
    tmp_path: Path,
) -> None:
    store, privacy = new_store(tmp_path), PrivacySettings(**SERVER)
    budget = PrivacyBudget(store, privacy, UNIFORM)
    announce(budget, "ann", 0, b"1")
    assert budget.epsilon() == 0.0
    for number, clients in enumerate((["ann"], ["ann", "bob"], ["bob"])):
        store.write(*budget.commit_writes(number, clients, None))
        budget.committed(clients, None)
    assert budget.epsilon() == epsilon(PrivacySpent(2 * update_cost(2.0)), 1e-5)
    store.close()
    store = new_store(tmp_path)
    assert PrivacyBudget(store, privacy, UNIFORM).spent == budget.spent
    store.close()


def test_drawn_rounds_are_spent_by_all_clients_and_cost_less(tmp_path: Path) -> None:
    store, privacy = new_store(tmp_path), PrivacySettings(**SERVER, amplification=True)
    budget = PrivacyBudget(store, privacy, UNIFORM)
    assert budget.draw(5, 5) is None  # No client is hidden if all are selected.
    assert budget.draw(0, 0) is None  # Nor is one hidden if the selection is unknown.
    for number in range(3):
        draw = budget.draw(5, 100)
        store.write(*budget.commit_writes(number, ["ann"], draw))
        budget.committed(["ann"], draw)
    assert 0 < budget.epsilon() < epsilon(PrivacySpent(update_cost(2.0)), 1e-5)
    store.close()
    store = new_store(tmp_path)
    assert PrivacyBudget(store, privacy, UNIFORM).spent == budget.spent
    # Amplification is off by default.
    assert PrivacyBudget(store, PrivacySettings(**SERVER), UNIFORM).draw(5, 100) is None
    store.close()


def test_noised_reports_are_spent_too(tmp_path: Path) -> None:
    store, privacy = (
        new_store(tmp_path),
        PrivacySettings(**CLIENT, reports="noised", report_noise=2.0),
    )
    budget = PrivacyBudget(store, privacy, recipe("adafedadam"))  # The rule needs gradient norms.
    announce(budget, "ann", 0, b"1", NOISED, REPORT.model_copy(update={"gradient_norm": 1.0}))
    cost = update_cost(2.0) + report_cost(2.0, 2)
    assert budget.spent.direct == pytest.approx(cost)
    budget.evaluation_reported("ann", 0, Evaluation(samples=1, loss=1.0), NOISED)
    budget.evaluation_reported("ann", 0, Evaluation(samples=1, loss=1.0), NOISED)  # a repetition
    assert budget.spent.direct == pytest.approx(cost + report_cost(2.0, 2))
    # Measured again, with other noise.
    budget.evaluation_reported("ann", 0, Evaluation(samples=1, loss=2.0), NOISED)
    assert budget.spent.direct == pytest.approx(cost + 2 * report_cost(2.0, 2))
    store.close()


def test_a_noised_loss_on_the_initial_model_is_spent_and_expected(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    privacy = PrivacySettings(**CLIENT, reports="noised", report_noise=2.0)
    rule = recipe("adafedadam")
    budget = PrivacyBudget(store, privacy, rule)
    late = REPORT.model_copy(update={"gradient_norm": 1.0, "initial_loss": 2.0})
    announce(budget, "ann", 3, b"1", NOISED, late)
    cost = update_cost(2.0) + report_cost(2.0, 3)
    assert budget.spent.direct == pytest.approx(cost)
    # Before a round, as much as any client may release in it counts.
    assert privacy.released_cost(rule) + privacy.initial_loss_cost(rule) == pytest.approx(cost)
    assert privacy.initial_loss_cost(recipe("adafedadam", reference="first")) == 0.0
    store.close()


@settings(max_examples=10, deadline=None)
@given(st.floats(2.0, 50.0))
def test_the_federation_ends_before_it_could_exceed_max_epsilon(
    tmp_path_factory: Any, limit: float
) -> None:
    store = new_store(tmp_path_factory.mktemp("store"))
    budget = PrivacyBudget(store, PrivacySettings(**CLIENT, max_epsilon=limit), UNIFORM)
    rounds = 0
    while (reason := budget.too_few_left(["ann"], (), 1)) is None:
        announce(budget, "ann", rounds, b"1")
        rounds += 1
    assert budget.epsilon() <= limit
    assert epsilon(PrivacySpent((rounds + 1) * update_cost(2.0)), 1e-5) > limit
    assert f"exceed epsilon {limit:g}" in reason
    store.close()


def test_an_update_is_spent_at_the_noise_it_has_not_at_the_required_noise(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    budget = PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    more = PrivacyTerms(clip=0.5, noise_multiplier=8.0)
    budget.refuse_weaker_update("ann", more)
    announce(budget, "ann", 0, b"1", more)
    assert budget.spent.direct == update_cost(8.0)
    # The cost of this one underflows a float.
    announce(budget, "bob", 0, b"2", PrivacyTerms(clip=0.5, noise_multiplier=1e300))
    store.write(store.update_write(StoredUpdate(0, "bob", b"2", "raw32", 1, REPORT, "file")))
    PrivacyBudget(
        store, PrivacySettings(**CLIENT), UNIFORM
    )  # After a restart, the update is recorded.
    store.close()


def test_a_client_cannot_spend_the_budget_by_endless_announcements(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path)
    budget = PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    for number in range(MOST_RELEASES):
        announce(budget, "eve", 0, bytes([number]))
    with pytest.raises(WrongState, match="eve has announced 8 different results for round 1"):
        announce(budget, "eve", 0, b"more")
    announce(budget, "eve", 0, bytes([3]))  # a repetition
    assert budget.spent.direct == pytest.approx(MOST_RELEASES * update_cost(2.0))
    announce(budget, "eve", 1, b"more")
    announce(budget, "ann", 0, b"more")
    store.close()


def test_each_client_stops_at_its_own_limit_and_the_others_go_on(tmp_path: Path) -> None:
    limit = epsilon(PrivacySpent(2 * update_cost(2.0)), 1e-5) + 1e-6
    store, privacy = new_store(tmp_path), PrivacySettings(**CLIENT, max_epsilon=limit)
    budget = PrivacyBudget(store, privacy, UNIFORM)
    for number in range(2):
        announce(budget, "ann", number, b"1")
    announce(budget, "bob", 0, b"2")
    assert [budget.may_train(client) for client in ("ann", "bob", "new")] == [False, True, True]
    assert budget.may_evaluate("ann"), "plain evaluations cost nothing"
    assert "its privacy budget is spent" in budget.obstacle("ann")
    assert budget.obstacle("bob") == ""
    # Bob is away, but may come back.
    assert budget.too_few_left(["ann"], (), minimum=1) is None
    assert "1 of 2 clients" in str(budget.too_few_left(["ann"], ["bob"], minimum=1))
    assert "a round needs 2" in str(budget.too_few_left(["ann", "bob"], (), minimum=2))
    store.close()
    store = new_store(tmp_path)
    assert not PrivacyBudget(store, privacy, UNIFORM).may_train("ann")  # after a restart, too
    store.close()


def test_clients_that_their_owners_retired_are_counted_with_those_that_may_return(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path)
    budget = PrivacyBudget(store, PrivacySettings(**CLIENT), UNIFORM)
    announce(budget, "bob", 0, b"1")
    assert budget.too_many_retired(["ann"], {}, (), minimum=3) == "", "they are waited for"
    assert budget.too_many_retired(["cat"], {"ann": "spent"}, (), minimum=2) == "", "bob may return"
    why = budget.too_many_retired(["cat"], {"ann": "spent"}, ["bob"], minimum=2)
    assert "1 of 2 clients have retired" in why
    assert "1 can still train, and a round needs 2" in why
    assert budget.too_many_retired([], {"ann": "spent"}, ["ann"], minimum=2) == "", "revoked"
    store.close()


def test_without_an_exhausted_client_too_few_are_waited_for(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    budget = PrivacyBudget(store, PrivacySettings(**CLIENT, max_epsilon=50.0), UNIFORM)
    announce(budget, "ann", 0, b"1")
    assert budget.too_few_left(["ann"], (), minimum=5) is None
    store.close()


def test_noised_evaluations_end_with_the_budget(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    privacy = PrivacySettings(**CLIENT, reports="noised", report_noise=2.0, max_epsilon=9.0)
    budget = PrivacyBudget(store, privacy, UNIFORM)
    number = 0
    while budget.may_train("ann"):
        announce(budget, "ann", number, b"1", NOISED)
        budget.evaluation_reported("ann", number, Evaluation(samples=1, loss=1.0), NOISED)
        number += 1
    assert budget.epsilon() <= 9.0
    while budget.may_evaluate("ann"):
        number += 1
        budget.evaluation_reported("ann", number, Evaluation(samples=1, loss=1.0), NOISED)
    assert budget.epsilon() <= 9.0
    store.close()


def test_with_random_draws_clients_are_exhausted_together(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    privacy = PrivacySettings(**SERVER, amplification=True, max_epsilon=1.0)
    budget = PrivacyBudget(store, privacy, UNIFORM)
    assert not budget.retires_clients
    assert budget.may_train("ann")
    assert "1 is allowed" in str(budget.reason_to_end(5, 5))
    store.close()
