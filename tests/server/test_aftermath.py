"""What steps did to losses, told by the reports that clients send anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.aftermath import Aftermath, Measured, measure
from fairfleet.server.descent_records import Reported, late_report_write
from fairfleet.server.publication import Publication
from fairfleet.server.rounds import ModelStored, Phase, Round
from fairfleet.server.store import Store, StoredModel, StoredUpdate


class Rounds:
    """Rounds as they are committed, each with its clients' losses."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        model = Model.of({"w": np.zeros(2, np.float32)})
        self.store.create("test", model, Publication.of(0, model).digest)
        self.aftermath = Aftermath(self.store, 0)
        self.number = 0

    def commit(self, losses: dict[str, float], *dropped: str) -> Measured | None:
        number = self.number
        updates = [
            StoredUpdate(number, client, bytes(32), "raw32", 8, report_of(loss), None)
            for client, loss in losses.items()
        ]
        told = self.aftermath.committed(number, updates, dropped)
        record: dict[str, Any] = {"round": number, "dropped": list(dropped)}
        model = StoredModel(number + 1, bytes(32), "models/x")
        writes = [self.store.update_write(update) for update in updates]
        writes += [self.store.commit_writes(model, record, keep=2), *told.writes]
        before, after = Round(number, Phase.AGGREGATING), Round(number + 1)
        self.store.record([(before, ModelStored(number + 1), after)], after, *writes)
        self.number += 1
        return told.measured

    def restart(self) -> None:
        folder = self.store.folder
        self.store.close()
        self.store = Store(folder)
        self.aftermath = Aftermath(self.store, self.number)

    def records(self) -> list[dict[str, Any]]:
        return self.store.records(0, self.number)


def report_of(loss: float) -> TrainReport:
    return TrainReport(samples=1, loss_before=loss, loss_after=0.0, steps=1, learning_rate=0.1)


def test_a_step_is_measured_by_those_who_took_part_before_and_after_it() -> None:
    before = {"a": Reported(1.0, 3), "b": Reported(1.0, 3), "c": Reported(1.0, 2), "d": Reported(1.0, 3)}
    after = {"a": Reported(0.5, 4), "b": Reported(1.0, 4), "c": Reported(0.1, 4), "e": Reported(0.1, 4)}
    assert measure(3, before, after) == Measured(3, improved=0.5, clients=2)
    assert measure(3, before, {"e": Reported(0.1, 4)}) is None


def test_what_a_step_did_is_in_its_own_rounds_record_once_the_next_is_committed(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    assert rounds.commit({"a": 3.0, "b": 3.0}) is None
    rounds.restart()
    assert rounds.commit({"a": 2.0, "b": 4.0}) == Measured(0, 0.5, 2)
    assert [record["measured"] for record in rounds.records()] == [{"improved": 0.5, "clients": 2}, None]
    rounds.store.close()


def test_whoever_was_cut_off_is_followed_until_its_next_report(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.commit({"a": 3.0, "slow": 5.0}, "never")
    rounds.commit({"a": 2.0}, "slow")
    rounds.commit({"a": 1.0}, "slow")
    rounds.restart()
    rounds.commit({"a": 1.0, "slow": 6.0})
    assert [record["cut_off"] for record in rounds.records()] == [
        [{"client": "never"}],
        [{"client": "slow", "loss_before": 5.0, "round_before": 0, "loss_after": 6.0, "round_after": 3}],
        [{"client": "slow", "loss_before": 5.0, "round_before": 0, "loss_after": 6.0, "round_after": 3}],
        [],
    ]
    rounds.store.close()


def test_a_late_update_tells_the_loss_of_the_very_model_it_was_late_for(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.commit({"a": 3.0}, "slow")
    rounds.store.write(late_report_write("slow", Reported(7.0, 0)))
    rounds.commit({"a": 2.0, "slow": 6.5})
    assert rounds.records()[0]["cut_off"] == [
        {"client": "slow", "loss_before": 7.0, "round_before": 0, "loss_after": 6.5, "round_after": 1}
    ]
    rounds.store.close()
