"""What privacy goes with, what it refuses, and what it keeps count of."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fairfleet.common.errors import UsageError, WrongState
from fairfleet.common.privacy import ReportTerms, SeededNoise, Terms, norm
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.accounting import Spent, epsilon, report_cost, update_cost
from fairfleet.server.committing import Committed, Committer
from fairfleet.server.gram import Gram
from fairfleet.server.privacy import PrivacySettings, model_refusal
from fairfleet.server.privacy_records import MOST_RELEASES
from fairfleet.server.publication import Publication
from fairfleet.server.rounds import ModelStored, Phase, Round
from fairfleet.server.rules import Cohort, Report, listings, recipe
from fairfleet.server.settings import ServerSettings
from fairfleet.server.spending import Spending
from fairfleet.server.store import Store, StoredUpdate

CLIENT: dict[str, Any] = {"where": "client", "clip": 1.0, "noise_multiplier": 2.0}
SERVER: dict[str, Any] = {"where": "server", "clip": 1.0, "noise_multiplier": 2.0}
PARAMETERS: dict[str, dict[str, Any]] = {"krum": {"f": 0}}
UNIFORM = recipe("fedavg", weighting="uniform")


def settings_with(rule: str, privacy: dict[str, Any], **more: Any) -> ServerSettings:
    return ServerSettings.model_validate({"rule": {"name": rule}, "privacy": privacy} | more)


# ---- what goes with what -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", listings())
def test_noise_at_the_server_is_refused_for_every_rule_that_looks_at_updates(rule: str) -> None:
    with pytest.raises(ValidationError) as error:
        settings_with(rule, SERVER)
    for words in (repr(rule), "privacy.where: client", "weighting: uniform"):
        assert words in str(error.value)


@pytest.mark.parametrize("rule", [name for name in listings() if name != "fedmdfg"])
def test_noise_at_the_client_goes_with_every_rule(rule: str) -> None:
    settings_with(rule, CLIENT)
    settings_with(rule, CLIENT | {"reports": "noised"})


PLAIN = [name for name, one in listings().items() if one.parameters().get("weighting") == "samples"]


@pytest.mark.parametrize("rule", [name for name in PLAIN if recipe(name, weighting="uniform").rule.is_plain_mean()])
def test_noise_at_the_server_goes_with_the_plain_mean(rule: str) -> None:
    ServerSettings.model_validate({"rule": {"name": rule, "weighting": "uniform"}, "privacy": SERVER})


def test_the_plain_means_are_these() -> None:
    found = {name for name in PLAIN if recipe(name, weighting="uniform").rule.is_plain_mean()}
    assert found == {"fedavg", "fedprox", "ditto", "fedadam", "fedyogi", "fedadagrad"}


@given(st.integers(1, 6), st.integers(0, 2**32))
def test_a_rule_that_says_it_is_a_plain_mean_weighs_all_alike_whatever_they_sent(clients: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((clients, 3)) * 10.0 ** draw.uniform(-6, 6, (clients, 1))
    reports = [Report(samples=float(draw.integers(1, 99)), loss=float(draw.uniform(0, 9))) for _ in range(clients)]
    names = [f"client-{number}" for number in range(clients)]
    for rule in PLAIN:
        made = recipe(rule, weighting="uniform").rule
        if made.is_plain_mean():
            step = made.step(Cohort(Gram((rows @ rows.T)[None]), names, reports), made.initial())
            np.testing.assert_allclose(step.coefficients, np.full(clients, 1 / clients))


@pytest.mark.parametrize(
    ("rule", "privacy", "more", "words"),
    [
        ("fedmdfg", CLIENT | {"reports": "noised"}, {}, "steps are tried"),
        ("fedlf", CLIENT | {"reports": "noised"}, {"verification": {}}, "steps are tried"),
        ("fedavg", CLIENT | {"amplification": True}, {}, "noise at the server"),
        ("fedavg", CLIENT | {"cohort": 10}, {}, "noise at the server"),
        ("fedavg", CLIENT | {"noise_multiplier": 0.0, "max_epsilon": 3.0}, {}, "without noise"),
        ("fedavg", CLIENT | {"clip": 0.0}, {}, "greater than 0"),
        ("fedavg", CLIENT | {"delta": 1.0}, {}, "less than 1"),
    ],
)
def test_what_cannot_be_kept_is_refused(rule: str, privacy: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        settings_with(rule, privacy, **more)


@pytest.mark.parametrize("selection", ["samples", "least_recent", "power_of_choice"])
def test_a_selection_that_can_be_predicted_or_depends_on_data_hides_nobody(selection: str) -> None:
    given = {"rule": {"name": "fedavg", "weighting": "uniform"}, "privacy": SERVER | {"amplification": True}}
    ServerSettings.model_validate(given)
    with pytest.raises(ValidationError, match="hides nobody"):
        ServerSettings.model_validate(given | {"round": {"selection": selection}})


@pytest.mark.parametrize("admission", [{"norm": "clip"}, {"loss": "reject"}, {"samples": "cap"}])
def test_noise_at_the_server_does_not_go_with_admission_that_acts(admission: dict[str, str]) -> None:
    given = {"rule": {"name": "fedavg", "weighting": "uniform"}, "privacy": SERVER}
    with pytest.raises(ValidationError, match="admission clips"):
        ServerSettings.model_validate(given | {"admission": admission})
    settings_with("fedavg", CLIENT, admission=admission)
    ServerSettings.model_validate(given | {"admission": dict.fromkeys(admission, "observe")})


def test_a_model_with_buffers_is_refused_by_name() -> None:
    weights = {"weight": np.zeros(3, np.float32)}
    buffers = {"norm.running_mean": np.zeros(2, np.float32), "norm.count": np.array(0)}
    why = model_refusal(Model.of(weights, buffers).signature)
    assert why is not None
    assert "norm.running_mean" in why
    assert "GroupNorm" in why
    assert model_refusal(Model.of(weights).signature) is None


def test_every_kind_of_privacy_says_what_it_does_not_cover() -> None:
    plain, noised = (PrivacySettings(**CLIENT, reports=kind) for kind in ("uncovered", "noised"))
    for words in ("losses", "gradient norms", "sample counts", "evaluations", "epsilon does not cover them"):
        assert words in plain.not_covered
    assert "sample counts" in noised.not_covered
    assert "the server and its operator see every update" in PrivacySettings(**SERVER).against


# ---- what the server commits -------------------------------------------------------------------


def committed_model(folder: Path, rows: dict[str, np.ndarray], privacy: PrivacySettings, cohort: int) -> Committed:
    store, model = Store(folder), Model.of({"weight": np.zeros(len(next(iter(rows.values()))), np.float32)})
    store.create("test", model, Publication.of(0, model).digest)
    committer = Committer.open(store, 0, UNIFORM, privacy=privacy.disguised(cohort, SeededNoise(1)))
    updates = {}
    for client, values in rows.items():
        report = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=0.1)
        row = Model.empty(model.signature)
        row.parameters[:] = values
        updates[client] = (StoredUpdate(0, client, bytes(32), "raw32", 1, report, None), row)
        committer.add(client, row, rows)
    with ThreadPoolExecutor(1) as workers:
        committed = committer.aggregate(updates, workers)
    store.close()
    assert isinstance(committed, Committed)
    return committed


def test_one_client_moves_the_models_mean_by_no_more_than_twice_the_bound_over_the_cohort(tmp_path: Path) -> None:
    """The same noise twice, and one client's update replaced by another: what is left is the sensitivity."""
    others = {"bob": np.full(50, 0.01), "cem": np.full(50, -3.0)}
    privacy = PrivacySettings(where="server", clip=0.5, noise_multiplier=1.0)
    models = [
        committed_model(tmp_path / str(at), {"ann": np.full(50, value), **others}, privacy, cohort=4).model.parameters
        for at, value in enumerate((1e6, -1e6, 0.0))
    ]
    for one in models:
        for other in models:
            assert norm(one - other) <= 2 * 0.5 / 4 * (1 + 1e-5)
    assert norm(models[0] - models[1]) == pytest.approx(2 * 0.5 / 4, rel=1e-4)  # and no less: the bound is reached


def test_the_mean_has_the_stated_noise_over_a_fixed_number_however_many_answered(tmp_path: Path) -> None:
    privacy = PrivacySettings(where="server", clip=2.0, noise_multiplier=3.0)
    for at, clients in enumerate((1, 3)):
        rows = {f"client-{number}": np.full(40_000, 1.0) for number in range(clients)}
        model = committed_model(tmp_path / str(at), rows, privacy, cohort=5).model.parameters
        assert float(np.std(model)) == pytest.approx(3.0 * 2.0 / 5, rel=0.03)
        assert float(np.mean(model)) == pytest.approx(-clients * 2.0 / 200 / 5, abs=5 * 1.2 / 200)


# ---- what is spent -----------------------------------------------------------------------------

REPORT = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=0.1)
MADE = Terms(clip=1.0, noise_multiplier=2.0)
NOISED = Terms(
    clip=1.0, noise_multiplier=2.0, reports=ReportTerms(noise_multiplier=2.0, loss_bound=5.0, gradient_bound=5.0)
)


def announce(
    spending: Spending, client: str, number: int, digest: bytes, made: Terms = MADE, report: TrainReport = REPORT
) -> None:
    spending.update_announced(client, number, digest, made, report)


def new_store(folder: Path) -> Store:
    store, model = Store(folder), Model.of({"weight": np.zeros(3, np.float32)})
    if not store.has_federation:
        store.create("test", model, Publication.of(0, model).digest)
    return store


def test_every_announced_update_is_spent_once_and_for_ever(tmp_path: Path) -> None:
    privacy = PrivacySettings(**CLIENT)
    store = new_store(tmp_path)
    spending = Spending(store, privacy, UNIFORM)
    assert spending.epsilon() == 0.0
    announce(spending, "ann", 0, b"1")
    announce(spending, "ann", 0, b"1")  # sent again after a broken link
    one = spending.epsilon()
    assert one == epsilon(Spent(update_cost(2.0)), 1e-5)
    announce(spending, "bob", 0, b"2")
    assert spending.epsilon() == one  # of the client of whom most was released
    announce(spending, "ann", 0, b"3")  # it lost its own, and made another: two releases
    assert spending.epsilon() == epsilon(Spent(2 * update_cost(2.0)), 1e-5)
    spending.committed(["ann", "bob"], None)
    assert spending.commit_writes(0, ["ann", "bob"], None) == []
    before = spending.epsilon()
    store.close()
    store = new_store(tmp_path)
    assert Spending(store, privacy, UNIFORM).epsilon() == before
    louder = PrivacySettings(**CLIENT | {"noise_multiplier": 50.0})  # the past is not made better by it
    assert Spending(store, louder, UNIFORM).epsilon() == before
    store.close()


def test_at_the_server_only_committed_rounds_are_spent_by_those_who_took_part(tmp_path: Path) -> None:
    store, privacy = new_store(tmp_path), PrivacySettings(**SERVER)
    spending = Spending(store, privacy, UNIFORM)
    announce(spending, "ann", 0, b"1")
    assert spending.epsilon() == 0.0
    for number, clients in enumerate((["ann"], ["ann", "bob"], ["bob"])):
        store.write(*spending.commit_writes(number, clients, None))
        spending.committed(clients, None)
    assert spending.epsilon() == epsilon(Spent(2 * update_cost(2.0)), 1e-5)
    store.close()
    store = new_store(tmp_path)
    assert Spending(store, privacy, UNIFORM).spent == spending.spent
    store.close()


def test_drawn_rounds_are_spent_by_everyone_and_cheaper(tmp_path: Path) -> None:
    store, privacy = new_store(tmp_path), PrivacySettings(**SERVER, amplification=True)
    spending = Spending(store, privacy, UNIFORM)
    assert spending.draw(5, 5) is None  # nobody is hidden where all are asked
    assert spending.draw(0, 0) is None  # nor where it is not known who was
    for number in range(3):
        draw = spending.draw(5, 100)
        store.write(*spending.commit_writes(number, ["ann"], draw))
        spending.committed(["ann"], draw)
    assert 0 < spending.epsilon() < epsilon(Spent(update_cost(2.0)), 1e-5)
    store.close()
    store = new_store(tmp_path)
    assert Spending(store, privacy, UNIFORM).spent == spending.spent
    assert Spending(store, PrivacySettings(**SERVER), UNIFORM).draw(5, 100) is None  # not counted on unless asked
    store.close()


def test_noised_reports_are_spent_too(tmp_path: Path) -> None:
    store, privacy = new_store(tmp_path), PrivacySettings(**CLIENT, reports="noised", report_noise=2.0)
    spending = Spending(store, privacy, recipe("adafedadam"))  # which needs gradient norms
    announce(spending, "ann", 0, b"1", NOISED, REPORT.model_copy(update={"gradient_norm": 1.0}))
    cost = update_cost(2.0) + report_cost(2.0, 2)
    assert spending.spent.direct == pytest.approx(cost)
    spending.evaluation_reported("ann", 0, Evaluation(samples=1, loss=1.0), NOISED)
    spending.evaluation_reported("ann", 0, Evaluation(samples=1, loss=1.0), NOISED)  # a repetition
    assert spending.spent.direct == pytest.approx(cost + report_cost(2.0, 2))
    spending.evaluation_reported("ann", 0, Evaluation(samples=1, loss=2.0), NOISED)  # measured again: other noise
    assert spending.spent.direct == pytest.approx(cost + 2 * report_cost(2.0, 2))
    store.close()


@settings(max_examples=10, deadline=None)
@given(st.floats(2.0, 50.0))
def test_the_federation_ends_before_it_could_spend_more_than_is_allowed(tmp_path_factory: Any, limit: float) -> None:
    store = new_store(tmp_path_factory.mktemp("store"))
    spending = Spending(store, PrivacySettings(**CLIENT, max_epsilon=limit), UNIFORM)
    rounds = 0
    while (reason := spending.reason_to_end(2, 2)) is None:
        announce(spending, "ann", rounds, b"1")
        rounds += 1
    assert spending.epsilon() <= limit
    assert epsilon(Spent((rounds + 1) * update_cost(2.0)), 1e-5) > limit
    assert f"{limit:g} is allowed" in reason
    store.close()


def test_a_federation_that_began_without_privacy_is_not_given_an_epsilon(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    round_0, stored = Round(0, Phase.AGGREGATING), ModelStored(1)
    store.record([(round_0, stored, Round(1))], Round(1), lambda c: None)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("insert into rounds values (0, '{\"round\": 0}')")
    with pytest.raises(UsageError, match="without privacy at the client, which no epsilon covers"):
        Spending(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_updates_that_came_without_noise_are_not_counted_as_noised(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.write(store.update_write(StoredUpdate(0, "ann", bytes(32), "raw32", 1, REPORT, "file")))
    with pytest.raises(UsageError, match="without privacy at the client, which no epsilon covers"):
        Spending(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_updates_that_only_the_server_was_to_noise_are_not_counted_as_noised_by_their_clients(tmp_path: Path) -> None:
    """Their noised reports are in the books; they themselves are not."""
    store = new_store(tmp_path)
    trusted = Spending(store, PrivacySettings(**SERVER, reports="noised"), UNIFORM)
    announce(trusted, "ann", 0, bytes(32), Terms(reports=NOISED.reports))
    assert trusted.spent.direct == report_cost(2.0, 1)
    store.write(store.update_write(StoredUpdate(0, "ann", bytes(32), "raw32", 1, REPORT, "file")))
    with pytest.raises(UsageError, match="without privacy at the client, which no epsilon covers"):
        Spending(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_rounds_that_the_server_noised_are_not_said_to_be_hidden_from_it(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    with store._engine.begin() as connection:
        record = json.dumps({"round": 0, "privacy": {"where": "server", "drawn": False}})
        connection.exec_driver_sql("insert into rounds values (0, ?)", (record,))
    Spending(store, PrivacySettings(**SERVER), UNIFORM)
    with pytest.raises(UsageError, match="without privacy at the client"):
        Spending(store, PrivacySettings(**CLIENT), UNIFORM)
    store.close()


def test_an_update_is_spent_at_the_noise_it_has_not_at_what_is_asked_for(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    spending = Spending(store, PrivacySettings(**CLIENT), UNIFORM)
    more = Terms(clip=0.5, noise_multiplier=8.0)
    spending.refuse_weaker_update("ann", more)
    announce(spending, "ann", 0, b"1", more)
    assert spending.spent.direct == update_cost(8.0)
    announce(spending, "bob", 0, b"2", Terms(clip=0.5, noise_multiplier=1e300))  # which costs too little for a float
    store.write(store.update_write(StoredUpdate(0, "bob", b"2", "raw32", 1, REPORT, "file")))
    Spending(store, PrivacySettings(**CLIENT), UNIFORM)  # starts again: it is in the books
    store.close()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Terms(), "was not clipped, not to 1 as this server asks by now"),
        (Terms(clip=1.0), "has noise of 0 times its clip, not 2"),
        (Terms(clip=1.0, noise_multiplier=1.9), "has noise of 1.9 times its clip, not 2"),
        (Terms(clip=1.1, noise_multiplier=2.0), "was clipped to 1.1, not to 1"),
    ],
)
def test_an_update_made_with_less_privacy_than_is_asked_for_by_now_is_refused(
    tmp_path: Path, made: Terms, words: str
) -> None:
    store = new_store(tmp_path)
    with pytest.raises(WrongState, match=words):
        Spending(store, PrivacySettings(**CLIENT), UNIFORM).refuse_weaker_update("ann", made)
    Spending(store, PrivacySettings(**SERVER), UNIFORM).refuse_weaker_update("ann", made)  # which asks nothing of it
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
def test_reports_made_with_less_privacy_than_is_asked_for_by_now_are_refused(
    tmp_path: Path, fields: dict[str, float] | None, words: str
) -> None:
    store = new_store(tmp_path)
    spending = Spending(store, PrivacySettings(**CLIENT, reports="noised", report_noise=2.0), UNIFORM)
    assert NOISED.reports is not None
    reports = None if fields is None else NOISED.reports.model_copy(update=fields)
    made = NOISED.model_copy(update={"reports": reports})
    for refuse in (spending.refuse_weaker_update, spending.refuse_weaker_evaluation):
        refuse("ann", NOISED)
        with pytest.raises(WrongState, match=words):
            refuse("ann", made)
    store.close()


def test_no_client_can_spend_the_federations_budget_by_announcing_without_end(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    spending = Spending(store, PrivacySettings(**CLIENT), UNIFORM)
    for number in range(MOST_RELEASES):
        announce(spending, "eve", 0, bytes([number]))
    with pytest.raises(WrongState, match="eve has announced 8 different results for round 0"):
        announce(spending, "eve", 0, b"more")
    announce(spending, "eve", 0, bytes([3]))  # a repetition
    assert spending.spent.direct == pytest.approx(MOST_RELEASES * update_cost(2.0))
    announce(spending, "eve", 1, b"more")
    announce(spending, "ann", 0, b"more")
    store.close()


def test_what_was_reported_before_reports_were_noised_is_said_not_to_be_covered(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    plain, noised = PrivacySettings(**CLIENT), PrivacySettings(**CLIENT, reports="noised")

    def told(privacy: PrivacySettings) -> str:
        return Spending(store, privacy, UNIFORM).status().not_covered

    assert "before round" not in told(noised)
    assert "before round" not in told(plain)
    announce(Spending(store, plain, UNIFORM), "ann", 0, bytes(32))
    store.write(store.update_write(StoredUpdate(0, "ann", bytes(32), "raw32", 1, REPORT, "file")))
    for _ in range(2):
        assert told(noised).endswith("; nor what was reported before round 1")
    store.close()
