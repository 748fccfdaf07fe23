"""Changes of losses by steps, measured from the reports that clients send anyway."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import numpy as np

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.rounds.state_machine import ModelStored, Phase, Round
from fairfleet.server.storage.improvement import ImprovementTracker, MeasuredStep, measure
from fairfleet.server.storage.round_record import CutOffClient, RoundRecord, StepImprovement
from fairfleet.server.storage.step_queries import ReportedLoss, late_report_write
from fairfleet.server.storage.store import Store, StoredModel, StoredUpdate
from fairfleet.server.transfer.published_model import PublishedModel


class Rounds:
    """Committed rounds, each with the losses of its clients."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        model = Model.of({"w": np.zeros(2, np.float32)})
        self.store.create("test", model, PublishedModel.of(0, model).digest)
        self.aftermath = ImprovementTracker(self.store, 0)
        self.number = 0

    def commit(self, losses: dict[str, float], *dropped: str) -> MeasuredStep | None:
        number = self.number
        updates = [
            StoredUpdate(number, client, bytes(32), "raw32", 8, report_of(loss), None)
            for client, loss in losses.items()
        ]
        report = self.aftermath.committed(number, updates, dropped)
        record = RoundRecord(number, bytes(32), (), {}, 0.0, dropped=dropped)
        model = StoredModel(number + 1, bytes(32), "models/x")
        writes = [self.store.update_write(update) for update in updates]
        writes += [self.store.commit_writes(model, lambda: record, keep=2), *report.writes]
        before, after = Round(number, Phase.AGGREGATING), Round(number + 1)
        self.store.record([(before, ModelStored(number + 1), after)], after, *writes)
        self.number += 1
        return report.measured

    def restart(self) -> None:
        folder = self.store.folder
        self.store.close()
        self.store = Store(folder)
        self.aftermath = ImprovementTracker(self.store, self.number)

    def records(self) -> list[RoundRecord]:
        return self.store.records(0, self.number)


def report_of(loss: float) -> TrainReport:
    return TrainReport(samples=1, loss_before=loss, loss_after=0.0, steps=1, learning_rate=0.1)


def test_a_step_is_measured_by_participants_of_both_rounds() -> None:
    before = {
        "a": ReportedLoss(1.0, 3),
        "b": ReportedLoss(1.0, 3),
        "c": ReportedLoss(1.0, 2),
        "d": ReportedLoss(1.0, 3),
    }
    after = {
        "a": ReportedLoss(0.5, 4),
        "b": ReportedLoss(1.0, 4),
        "c": ReportedLoss(0.1, 4),
        "e": ReportedLoss(0.1, 4),
    }
    assert measure(3, before, after) == MeasuredStep(
        3, improved=1.0, strictly_improved=0.5, clients=2
    )
    assert measure(3, before, {"e": ReportedLoss(0.1, 4)}) is None


def test_the_effect_of_a_step_is_in_its_record_after_the_next_commit(
    tmp_path: Path,
) -> None:
    rounds = Rounds(tmp_path)
    assert rounds.commit({"a": 3.0, "b": 3.0}) is None
    rounds.restart()
    assert rounds.commit({"a": 2.0, "b": 4.0}) == MeasuredStep(0, 0.5, 0.5, 2)
    assert [record.measured for record in rounds.records()] == [
        StepImprovement(0.5, 2, 0.5),
        None,
    ]
    rounds.store.close()


def test_an_older_row_keeps_its_reading_through_the_migration(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.commit({"a": 3.0, "b": 3.0})
    rounds.commit({"a": 2.0, "b": 3.0})
    rounds.store.close()
    database = next(tmp_path.glob("*.db"))
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE measures SET improved = 0.5")  # as servers counted then
        connection.execute("ALTER TABLE measures DROP COLUMN strictly_improved")
        connection.execute("UPDATE meta SET value = '8' WHERE key = 'schema_version'")
    rounds = Rounds.__new__(Rounds)
    rounds.store, rounds.number = Store(tmp_path), 2
    older = rounds.records()[0].measured
    assert older == StepImprovement(0.5, 2)
    assert (older.not_risen, older.fallen) == (None, 0.5)
    rounds.restart()
    assert rounds.commit({"a": 2.0, "b": 4.0}) == MeasuredStep(1, 0.5, 0.0, 2)
    assert rounds.records()[1].measured == StepImprovement(0.5, 2, 0.0)
    rounds.store.close()


def test_a_late_client_is_tracked_until_its_next_report(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.commit({"a": 3.0, "slow": 5.0}, "never")
    rounds.commit({"a": 2.0}, "slow")
    rounds.commit({"a": 1.0}, "slow")
    rounds.restart()
    rounds.commit({"a": 1.0, "slow": 6.0})
    assert [record.cut_off for record in rounds.records()] == [
        (CutOffClient("never"),),
        (CutOffClient("slow", 5.0, 0, 6.0, 3),),
        (CutOffClient("slow", 5.0, 0, 6.0, 3),),
        (),
    ]
    rounds.store.close()


def test_a_late_update_reports_the_loss_of_the_model_it_was_trained_on(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.commit({"a": 3.0}, "slow")
    rounds.store.write(late_report_write("slow", ReportedLoss(7.0, 0)))
    rounds.commit({"a": 2.0, "slow": 6.5})
    assert rounds.records()[0].cut_off == (CutOffClient("slow", 7.0, 0, 6.5, 1),)
    rounds.store.close()
