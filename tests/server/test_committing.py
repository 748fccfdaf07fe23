"""From rows to the committed model: whatever the rule, a restart between two rounds changes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.admission import OFF, Admission
from fairfleet.server.committing import Committed, Committer, Proposal
from fairfleet.server.publication import Publication
from fairfleet.server.rounds import ModelStored, Phase, Round
from fairfleet.server.rules import listings, recipe
from fairfleet.server.store import Store, StoredUpdate
from fairfleet.server.tensor_files import FREE_MODEL

CLIENTS = ("ann", "bob", "cem", "dia", "eve")
ROUNDS = 6
PARAMETERS = {"fedfv": {"tau": 2}, "krum": {"f": 0}}  # where the defaults do not suit three clients


def initial() -> Model:
    weights = {"one.weight": np.ones((4, 5), np.float32), "one.bias": np.ones(4, np.float32)}
    return Model.of(weights, {"norm.running_mean": np.zeros(2, np.float32), "norm.count": np.array(0)})


def updates_of(number: int, many: int = 3) -> dict[str, tuple[StoredUpdate, Model]]:
    """Three of five clients, another three in every round, with rows that conflict."""
    draw = np.random.default_rng(number)
    found = {}
    for client in sorted(draw.permutation(CLIENTS)[:many]):
        row = Model.empty(initial().signature)
        row.parameters[:] = draw.standard_normal(len(row.parameters))
        row.buffers[:] = draw.standard_normal(2)
        row.counters[:] = draw.integers(100)
        report = TrainReport(
            samples=int(draw.integers(1, 50)), loss_before=float(draw.uniform(0.1, 3)), loss_after=0.1, steps=5,
            learning_rate=0.1, gradient_norm=float(draw.uniform(1, 9)), accuracy=float(draw.uniform(0.1, 0.9)),
        )  # fmt: skip
        found[str(client)] = (StoredUpdate(number, str(client), bytes(32), "raw32", 96, report, None), row)
    return found


class Shop:
    """A state directory and what the coordinator does with a committer, without a network."""

    def __init__(self, folder: Path, rule: str, admission: Admission = OFF) -> None:
        self.admission = admission
        self.recipe = recipe(rule, **PARAMETERS.get(rule, {}))
        self.store = Store(folder)
        model = initial()
        self.store.create("test", model, Publication.of(0, model).digest)
        self.workers = ThreadPoolExecutor(2)
        self.committer = self._opened()

    def run_round(self, number: int) -> Committed:
        updates = updates_of(number)
        for client in sorted(updates, reverse=number % 2 == 0):  # they arrive in any order
            self.committer.add(client, updates[client][1], updates)
            self.committer.multiply()
        made = self.committer.aggregate(updates, self.workers)
        if isinstance(made, Proposal):  # the rule wants a line search; these clients take the second trial
            made = self.committer.take(made, 1, updates, self.workers)
        committed = made
        record = committed.record | {"dropped": [], "attempts": 1, "training_seconds": 0.0}
        before, after = Round(number, Phase.AGGREGATING), Round(number + 1)
        writes = [self.store.update_write(update) for update, _ in updates.values()]
        committed.written.result()
        writes.append(self.store.commit_writes(committed.stored, record, keep=2))
        writes.append(self.store.history_write(committed.remembered, committed.forgotten))
        self.store.record([(before, ModelStored(number + 1), after)], after, *writes)
        self.committer.adopt(committed, updates)
        return committed

    def restart(self) -> None:
        folder = self.store.folder
        self.store.close()
        self.store = Store(folder)
        self.committer = self._opened()

    def _opened(self) -> Committer:
        return Committer.open(self.store, self.store.current_round().number, self.recipe, admission=self.admission)


@pytest.fixture
def shops(tmp_path: Path, rule: str) -> Iterator[tuple[Shop, Shop]]:
    pair = Shop(tmp_path / "one", rule), Shop(tmp_path / "other", rule)
    yield pair
    for shop in pair:
        shop.workers.shutdown()
        shop.store.close()


@pytest.mark.parametrize("rule", sorted(listings()))
def test_a_restart_between_rounds_changes_no_bit_of_any_rules_model(shops: tuple[Shop, Shop]) -> None:
    steady, restarted = shops
    for number in range(ROUNDS):
        model = steady.run_round(number).model
        again = restarted.run_round(number).model
        assert np.isfinite(model.parameters).all()
        np.testing.assert_array_equal(model.parameters, again.parameters)
        np.testing.assert_array_equal(model.buffers, again.buffers)
        restarted.restart()


@pytest.mark.parametrize("rule", ["fedlf", "term", "trimmed_mean"])
@pytest.mark.parametrize(("norm", "loss"), [("clip", "winsorise"), ("reject", "reject")])
def test_a_restart_between_rounds_changes_no_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, norm: str, loss: str
) -> None:
    everybody = partial(updates_of, many=len(CLIENTS))

    def some_lie(number: int) -> dict[str, tuple[StoredUpdate, Model]]:
        """The fleet learns, cem less than others; bob lies in every other round, dia's loss jumps up in round 8."""
        found = everybody(number)
        usual = 0.3 if number else 2.3
        losses = dict.fromkeys(CLIENTS, usual) | {"cem": 2.2, "bob": 1000.0 if number % 2 else usual}
        losses["dia"] = usual if number < 8 else 2.0
        if number % 2:
            found["bob"][1].parameters[:] *= 1000
        for client, (update, row) in found.items():
            report = update.report.model_copy(update={"loss_before": losses[client]})
            found[client] = (replace(update, report=report), row)
        return found

    monkeypatch.setattr(sys.modules[__name__], "updates_of", some_lie)
    admission = Admission.model_validate({"norm": norm, "loss": loss, "samples": "cap", "samples_factor": 1.5})
    steady, restarted = Shop(tmp_path / "one", rule, admission), Shop(tmp_path / "other", rule, admission)
    decisions = set()
    for number in range(2 * ROUNDS):
        committed, again = steady.run_round(number), restarted.run_round(number)
        np.testing.assert_array_equal(committed.model.parameters, again.model.parameters)
        np.testing.assert_array_equal(committed.model.buffers, again.model.buffers)
        found = committed.record.get("admission", [])
        assert found == again.record.get("admission", [])
        assert [update.client for update in committed.remembered] == [update.client for update in again.remembered]
        rejected = {one["client"] for one in found if one["decision"] == "rejected" and not one["stood_in"]}
        counted = {one["client"] for one in committed.record["contributions"]}
        assert counted == some_lie(number).keys() - rejected
        decisions |= {(one["check"], one["decision"]) for one in found}
        high = {one["client"] for one in found if one["check"] == "loss"}
        assert high == ({"bob"} if number % 2 else {"dia"} if number in (8, 10) else set())
        restarted.restart()
    done = {"clip": "clipped", "winsorise": "winsorised", "reject": "rejected"}
    assert decisions >= {("norm", done[norm]), ("loss", done[loss]), ("samples", "capped")}
    for shop in (steady, restarted):
        shop.workers.shutdown()
        shop.store.close()


@pytest.mark.parametrize("rule", ["fedfv", "fedlf"])
def test_absent_clients_rows_stand_in_after_a_restart_too(shops: tuple[Shop, Shop]) -> None:
    shop = shops[0]
    used = []
    for number in range(ROUNDS):
        used.append(shop.run_round(number).record["diagnostics"]["history_coefficients"])
        shop.restart()
    assert any(used), "in six rounds of three of five, somebody absent must have counted"
    for number, absent in enumerate(used):
        assert not absent.keys() & updates_of(number).keys()


@pytest.mark.parametrize("rule", ["fedavg"])
def test_buffers_are_averaged_by_samples_and_counters_take_the_largest(shops: tuple[Shop, Shop]) -> None:
    committed, updates = shops[0].run_round(0), updates_of(0)
    samples = np.array([update.report.samples for update, _ in updates.values()])
    rows = [row for _, row in updates.values()]
    expected = np.average([row.buffers for row in rows], axis=0, weights=samples)
    np.testing.assert_allclose(committed.model.buffers, expected, rtol=1e-6)
    assert committed.model.counters[0] == max(row.counters[0] for row in rows)
    mean = np.average([row.parameters for row in rows], axis=0, weights=samples)
    np.testing.assert_allclose(committed.model.parameters, initial().parameters - mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["fedadam"])
def test_old_models_and_optimizer_vectors_are_deleted_with_their_versions(shops: tuple[Shop, Shop]) -> None:
    shop = shops[0]
    for number in range(ROUNDS):
        shop.run_round(number)
        shop.store.files.retire_round(number + 1, keep=2)
    files = sorted(path.name for path in (shop.store.folder / "models").iterdir())
    kept = [f"{v:08d}.{kind}" for v in (5, 6) for kind in ("optimizer.safetensors", "safetensors")]
    assert files == [*kept, FREE_MODEL]
    assert shop.store.model(4) is None


@pytest.mark.parametrize("rule", ["fedavg"])
def test_a_model_that_is_being_read_or_is_in_a_backup_is_not_written_over(shops: tuple[Shop, Shop]) -> None:
    shop, folder = shops[0], shops[0].store.folder / "models"
    shop.run_round(0)
    found, backup = shop.store.model(1), shop.store.folder / "backup"
    os.link(folder / "00000000.safetensors", backup)
    first = backup.read_bytes()
    assert found is not None
    with shop.store.files.reading(found.file) as path, open(path, "rb") as file:
        second = path.read_bytes()
        for number in range(1, 5):
            shop.store.files.retire_round(number, keep=1)
            shop.run_round(number)
        assert file.read() == second
    assert backup.read_bytes() == first


@pytest.mark.parametrize("rule", ["adafedadam"])
def test_another_rule_after_a_restart_begins_with_a_clean_memory(shops: tuple[Shop, Shop]) -> None:
    shop = shops[0]
    shop.run_round(0)
    shop.recipe = recipe("afl")
    shop.restart()
    assert np.isfinite(shop.run_round(1).model.parameters).all()
