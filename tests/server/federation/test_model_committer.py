"""For every rule, a restart between two rounds does not change the committed models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.tensors import Model
from fairfleet.server.aggregation.admission import OFF, AdmissionSettings
from fairfleet.server.aggregation.diagnostics import DiagnosticsSetting
from fairfleet.server.aggregation.rule_loss import LossOfRule
from fairfleet.server.federation.model_committer import CommitterOptions, ModelCommitter
from fairfleet.server.federation.staged_model import StagedModel, StepProposal
from fairfleet.server.rounds.state_machine import ModelStored, Phase, Round
from fairfleet.server.rules import listings, recipe
from fairfleet.server.rules.base import State, Step
from fairfleet.server.rules.cohort import Cohort
from fairfleet.server.rules.directions.fedfv import FedFV
from fairfleet.server.rules.errors import RuleError
from fairfleet.server.storage.files.tensor_files import FREE_MODEL
from fairfleet.server.storage.store import Store, StoredUpdate
from fairfleet.server.transfer.published_model import PublishedModel
from tests.support.samples.updates import CLIENTS, initial, updates_of

ROUNDS = 6
PARAMETERS = {"fedfv": {"tau": 2}, "krum": {"f": 0}}  # The defaults do not fit three clients.


class Shop:
    """A state directory, and the use of a committer by a coordinator, without a network."""

    def __init__(
        self,
        folder: Path,
        rule: str,
        admission: AdmissionSettings = OFF,
        diagnostics: DiagnosticsSetting = "auto",
        rule_loss: LossOfRule = "before",
        **parameters: Any,
    ) -> None:
        self.admission, self.diagnostics, self.rule_loss = admission, diagnostics, rule_loss
        self.recipe = recipe(rule, **PARAMETERS.get(rule, {}), **parameters)
        self.store = Store(folder)
        model = initial()
        self.store.create("test", model, PublishedModel.of(0, model).digest)
        self.workers = ThreadPoolExecutor(2)
        self.committer = self._opened()

    def run_round(
        self, number: int, updates: dict[str, tuple[StoredUpdate, Model]] | None = None
    ) -> StagedModel:
        updates = updates or updates_of(number)
        for client in sorted(updates, reverse=number % 2 == 0):  # Updates arrive in any order.
            self.committer.add(client, updates[client][1], updates)
            self.committer.multiply()
        result = self.committer.aggregate(updates, self.workers)
        if isinstance(
            result, StepProposal
        ):  # The rule requests a line search. These clients choose the second trial.
            result = self.committer.take(result, 1, updates, self.workers)
        committed = result
        before, after = Round(number, Phase.AGGREGATING), Round(number + 1)
        writes = [self.store.update_write(update) for update, _ in updates.values()]
        committed.written.result()
        writes.append(self.store.commit_writes(committed.stored, lambda: committed.record, keep=2))
        writes.append(
            self.store.history_write(
                committed.remembered, committed.forgotten, self.committer.rule_loss
            )
        )
        self.store.record([(before, ModelStored(number + 1), after)], after, *writes)
        self.committer.adopt(committed, updates)
        return committed

    def restart(self) -> None:
        folder = self.store.folder
        self.store.close()
        self.store = Store(folder)
        self.committer = self._opened()

    def _opened(self) -> ModelCommitter:
        return ModelCommitter.open(
            self.store,
            self.store.current_round().number,
            self.recipe,
            CommitterOptions(
                admission=self.admission, diagnostics=self.diagnostics, rule_loss=self.rule_loss
            ),
        )


# `make test` tries rules with and without history, momentum and state; `make test-slow` the others.
COMMON = {"adafed", "adafedadam", "fedavg", "fedfv", "fedlf", "fedmgda"}
EVERY_RULE = [
    rule if rule in COMMON else pytest.param(rule, marks=pytest.mark.slow)
    for rule in sorted(listings())
]


@pytest.fixture
def shops(tmp_path: Path, rule: str) -> Iterator[tuple[Shop, Shop]]:
    pair = Shop(tmp_path / "one", rule), Shop(tmp_path / "other", rule)
    yield pair
    for shop in pair:
        shop.workers.shutdown()
        shop.store.close()


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_restart_between_rounds_changes_no_bit_of_any_rules_model(
    shops: tuple[Shop, Shop],
) -> None:
    steady, restarted = shops
    for number in range(ROUNDS):
        model = steady.run_round(number).model
        again = restarted.run_round(number).model
        assert np.isfinite(model.parameters).all()
        np.testing.assert_array_equal(model.parameters, again.parameters)
        np.testing.assert_array_equal(model.buffers, again.buffers)
        restarted.restart()


def with_losses(number: int, **constant: float) -> dict[str, tuple[StoredUpdate, Model]]:
    """Return updates whose losses before and after are alike, apart from the constant ones."""
    updates = updates_of(number)
    for client, (update, row) in updates.items():
        losses = {"loss_after": update.report.loss_before, **constant}
        report = update.report.model_copy(update=losses)
        updates[client] = (replace(update, report=report), row)
    return updates


@pytest.mark.parametrize("rule", ["adafed", "fedfv", "fedlf"])
def test_a_rule_that_receives_losses_after_training_uses_no_loss_before_it(
    tmp_path: Path, rule: str
) -> None:
    """Neither of this round, nor of earlier ones, in the history or after a restart."""
    admission = AdmissionSettings(loss="winsorise")
    before, after = (
        Shop(tmp_path / which, rule, admission, rule_loss=which) for which in ("before", "after")
    )
    for number in range(ROUNDS):
        expected = before.run_round(number, with_losses(number, loss_after=7.0))
        committed = after.run_round(number, with_losses(number, loss_before=7.0))
        np.testing.assert_array_equal(committed.model.parameters, expected.model.parameters)
        assert committed.record.admission == expected.record.admission
        after.restart()
    assert after.store.history_rows() == before.store.history_rows()
    for shop in (before, after):
        shop.workers.shutdown()
        shop.store.close()


@pytest.mark.parametrize("reference", ["initial", "first"])
def test_losses_after_training_are_divided_by_losses_before_it(
    tmp_path: Path, reference: str
) -> None:
    """F_k(0) is the loss on the initial model, or the first one, also after a restart."""
    shop = Shop(tmp_path / "one", "adafedadam", rule_loss="after", reference=reference)
    quotients = Shop(tmp_path / "other", "adafedadam", reference="none")
    first: dict[str, float] = {}
    for number in range(ROUNDS):
        sent, divided = updates_of(number), updates_of(number)
        for place, (client, (update, row)) in enumerate(sent.items(), start=1):
            report = update.report.model_copy(update={"loss_after": place / (number + 1)})
            is_first = reference == "first" or number == 0
            initial = report.loss_before if is_first else report.initial_loss
            assert initial is not None
            assert report.loss_after is not None
            quotient = report.loss_after / first.setdefault(client, initial)
            sent[client] = (replace(update, report=report), row)
            report = report.model_copy(update={"loss_before": quotient})
            divided[client] = (replace(update, report=report), divided[client][1])
        model = shop.run_round(number, sent).model
        expected = quotients.run_round(number, divided).model
        np.testing.assert_array_equal(model.parameters, expected.parameters)
        shop.restart()
    for each in (shop, quotients):
        each.workers.shutdown()
        each.store.close()


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_no_level_of_diagnostics_changes_a_bit_of_any_rules_model(
    tmp_path: Path, rule: str
) -> None:
    levels: list[DiagnosticsSetting] = ["full", "model", "off"]
    shops = [
        Shop(tmp_path / level, rule, AdmissionSettings(norm="clip"), level) for level in levels
    ]
    for number in range(4):
        committed = [shop.run_round(number) for shop in shops]
        assert [item.record.diagnostics["level"] for item in committed] == levels
        assert len({item.publication.digest for item in committed}) == 1
        assert len({item.stored.rule_state for item in committed}) == 1
        shops[number % 3].restart()
    for shop in shops:
        shop.workers.shutdown()
        shop.store.close()


@pytest.mark.parametrize("rule", ["fedlf", "term", "trimmed_mean"])
@pytest.mark.parametrize(("norm", "loss"), [("clip", "winsorise"), ("reject", "reject")])
def test_a_restart_between_rounds_changes_no_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, norm: str, loss: str
) -> None:
    everybody = partial(updates_of, many=len(CLIENTS))

    def some_lie(number: int) -> dict[str, tuple[StoredUpdate, Model]]:
        """cem learns less than the others. bob lies in odd rounds. dia's loss jumps in round 8."""
        updates = everybody(number)
        usual = 0.3 if number else 2.3
        losses = dict.fromkeys(CLIENTS, usual) | {
            "cem": 2.2,
            "bob": 1000.0 if number % 2 else usual,
        }
        losses["dia"] = usual if number < 8 else 2.0
        if number % 2:
            updates["bob"][1].parameters[:] *= 1000
        for client, (update, row) in updates.items():
            report = update.report.model_copy(update={"loss_before": losses[client]})
            updates[client] = (replace(update, report=report), row)
        return updates

    monkeypatch.setattr(sys.modules[__name__], "updates_of", some_lie)
    admission = AdmissionSettings.model_validate(
        {"norm": norm, "loss": loss, "samples": "cap", "samples_factor": 1.5}
    )
    steady, restarted = (
        Shop(tmp_path / "one", rule, admission),
        Shop(tmp_path / "other", rule, admission),
    )
    decisions = set()
    for number in range(2 * ROUNDS):
        committed, again = steady.run_round(number), restarted.run_round(number)
        np.testing.assert_array_equal(committed.model.parameters, again.model.parameters)
        np.testing.assert_array_equal(committed.model.buffers, again.model.buffers)
        findings = committed.record.admission
        assert findings == again.record.admission
        assert [update.client for update in committed.remembered] == [
            update.client for update in again.remembered
        ]
        rejected = {
            item.client for item in findings if item.decision == "rejected" and not item.stood_in
        }
        counted = {item.client for item in committed.record.contributions}
        assert counted == some_lie(number).keys() - rejected
        decisions |= {(item.check, item.decision) for item in findings}
        high = {item.client for item in findings if item.check == "loss"}
        assert high == ({"bob"} if number % 2 else {"dia"} if number in (8, 10) else set())
        restarted.restart()
    done = {"clip": "clipped", "winsorise": "winsorised", "reject": "rejected"}
    assert decisions >= {("norm", done[norm]), ("loss", done[loss]), ("samples", "capped")}
    for shop in (steady, restarted):
        shop.workers.shutdown()
        shop.store.close()


@pytest.mark.parametrize("rule", ["fedfv", "fedlf"])
def test_rows_of_absent_clients_are_used_after_a_restart(shops: tuple[Shop, Shop]) -> None:
    shop = shops[0]
    used = []
    for number in range(ROUNDS):
        used.append(shop.run_round(number).record.diagnostics["history_coefficients"])
        shop.restart()
    assert any(used), "in six rounds of three of five, somebody absent must have counted"
    for number, absent in enumerate(used):
        assert not absent.keys() & updates_of(number).keys()


@pytest.mark.parametrize("rule", ["fedavg"])
def test_buffers_are_averaged_by_samples_and_counters_grow_by_the_median(
    shops: tuple[Shop, Shop],
) -> None:
    committed, updates = shops[0].run_round(0), updates_of(0)
    samples = np.array([update.report.samples for update, _ in updates.values()])
    rows = [row for _, row in updates.values()]
    expected = np.average([row.buffers for row in rows], axis=0, weights=samples)
    np.testing.assert_allclose(committed.model.buffers, expected, rtol=1e-6)
    assert (
        committed.model.counters[0]
        == np.sort([row.counters[0] for row in rows])[(len(rows) - 1) // 2]
    )
    mean = np.average([row.parameters for row in rows], axis=0, weights=samples)
    np.testing.assert_allclose(
        committed.model.parameters, initial().parameters - mean, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rule", ["fedadam"])
def test_old_models_and_optimizer_vectors_are_deleted_with_their_versions(
    shops: tuple[Shop, Shop],
) -> None:
    shop = shops[0]
    for number in range(ROUNDS):
        shop.run_round(number)
        shop.store.files.retire_round(number + 1, [number - 1])
    files = sorted(path.name for path in (shop.store.folder / "models").iterdir())
    expected = [
        f"{v:08d}.{kind}" for v in (5, 6) for kind in ("optimizer.safetensors", "safetensors")
    ]
    assert files == [*expected, FREE_MODEL]
    assert shop.store.model(4) is None


@pytest.mark.parametrize("rule", ["fedavg"])
def test_a_model_that_is_open_or_hard_linked_is_not_overwritten(
    shops: tuple[Shop, Shop],
) -> None:
    shop, folder = shops[0], shops[0].store.folder / "models"
    shop.run_round(0)
    stored, backup = shop.store.model(1), shop.store.folder / "backup"
    os.link(folder / "00000000.safetensors", backup)
    first = backup.read_bytes()
    assert stored is not None
    with shop.store.files.reading(stored.file) as path, open(path, "rb") as file:
        second = path.read_bytes()
        for number in range(1, 5):
            shop.store.files.retire_round(number, [number - 1])
            shop.run_round(number)
        assert file.read() == second
    assert backup.read_bytes() == first


@pytest.mark.parametrize("rule", ["adafedadam"])
def test_another_rule_after_a_restart_begins_with_an_empty_state(shops: tuple[Shop, Shop]) -> None:
    shop = shops[0]
    shop.run_round(0)
    shop.recipe = recipe("afl")
    shop.restart()
    assert np.isfinite(shop.run_round(1).model.parameters).all()


# ---- updates that a round cannot be aggregated with ----------------------------------------------


def poisoned(number: int, client: str, **report: object) -> dict[str, tuple[StoredUpdate, Model]]:
    """Return a round of all clients in which one report was changed after it was stored."""
    updates = updates_of(number, many=len(CLIENTS))
    update, row = updates[client]
    return {
        **updates,
        client: (replace(update, report=update.report.model_copy(update=report)), row),
    }


def aggregated(shop: Shop, updates: dict[str, tuple[StoredUpdate, Model]]) -> StagedModel:
    for client, (_, row) in updates.items():
        shop.committer.add(client, row, updates)
    result = shop.committer.aggregate(updates, shop.workers)
    committed = (
        shop.committer.take(result, 0, updates, shop.workers)
        if isinstance(result, StepProposal)
        else result
    )
    committed.written.result()
    return committed


def quarantined(committed: StagedModel) -> list[str]:
    return [
        finding.client
        for finding in committed.record.admission
        if finding.decision == "quarantined"
    ]


def check_finite(committed: StagedModel) -> None:
    assert np.isfinite(committed.model.parameters).all()
    assert np.isfinite(committed.model.buffers).all()
    after = committed.state.optimizer
    assert all(np.isfinite(vector).all() for vector in (after.vectors.values() if after else ()))


@pytest.mark.parametrize(
    ("rule", "report"),
    [
        ("adafedadam", {"gradient_norm": None}),
        ("fedfa", {"accuracy": None}),
        ("qfedavg", {"learning_rate": 0.0}),
        ("fedavg", {"loss_before": 1.7e308}),
    ],
)
def test_an_update_stored_with_an_unusable_report_is_quarantined(
    shops: tuple[Shop, Shop], rule: str, report: dict[str, object]
) -> None:
    committed = aggregated(shops[0], poisoned(0, "cem", **report))
    assert quarantined(committed) == ["cem"]
    assert {part.client for part in committed.record.contributions} == {
        "ann",
        "bob",
        "dia",
        "eve",
    }
    assert [update.client for update in committed.quarantined] == ["cem"]
    assert next(iter(report)) in committed.quarantined[0].reason
    check_finite(committed)


@pytest.mark.parametrize("value", [3.4e38, 1e20, -1e-45])
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_row_of_extreme_values_never_leads_to_a_model_that_is_not_finite(
    shops: tuple[Shop, Shop], rule: str, value: float
) -> None:
    shop = shops[0]
    for number in range(2):
        updates = updates_of(number, many=len(CLIENTS))
        updates["cem"][1].parameters[:] = value
        committed = aggregated(shop, updates)
        check_finite(committed)
        assert set(quarantined(committed)) <= {"cem"}
        shop.committer.adopt(committed, updates)


class WithoutAbsentClients(FedFV):
    """A rule that requests the rows of absent clients and fails with them."""

    def step(self, cohort: Cohort, state: State) -> Step:
        """Fail if the cohort has an absent client."""
        if cohort.absent():
            raise RuleError("this rule fails with rows of absent clients")
        return super().step(cohort, state)


def test_a_round_that_fails_only_with_the_history_leaves_it_out_and_no_update(
    tmp_path: Path,
) -> None:
    shop = Shop(tmp_path, "fedfv")
    shop.recipe = replace(shop.recipe, rule=WithoutAbsentClients(tau=2))
    shop.restart()
    assert "history_left_out" not in shop.run_round(0).record.diagnostics["notes"]
    committed = shop.run_round(1)
    assert committed.record.diagnostics["notes"]["history_left_out"] is True
    assert committed.record.diagnostics["history_coefficients"] == {}
    assert not quarantined(committed)
    assert {part.client for part in committed.record.contributions} == updates_of(1).keys()
    shop.workers.shutdown()
    shop.store.close()


@pytest.mark.parametrize("rule", ["fedavg"])
def test_if_no_update_can_be_used_the_model_stays_as_it_is(shops: tuple[Shop, Shop]) -> None:
    shop, updates = shops[0], updates_of(0)
    unusable = {
        client: (replace(update, report=update.report.model_copy(update={"samples": 0})), row)
        for client, (update, row) in updates.items()
    }
    before = shop.committer.model.parameters.copy()
    committed = aggregated(shop, unusable)
    np.testing.assert_array_equal(committed.model.parameters, before)
    assert committed.stored.version == 1
    assert committed.record.diagnostics["status"] == "no_usable_update"
    assert quarantined(committed) == sorted(updates)


@pytest.mark.parametrize("rule", ["krum", "median", "trimmed_mean", "fedlf", "fedavg"])
def test_the_buffers_of_one_client_cannot_move_the_model_far(
    shops: tuple[Shop, Shop], rule: str
) -> None:
    updates = updates_of(0, many=len(CLIENTS))
    updates["cem"][1].buffers[:] = 1e30
    assert np.abs(aggregated(shops[0], updates).model.buffers).max() < 20
