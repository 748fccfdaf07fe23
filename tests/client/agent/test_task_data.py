"""A client looks for new data, tells its server how many there are, and waits for the first."""

from __future__ import annotations

from typing import Any

import pytest

from fairfleet.client.agent.sample_counts import SampleCounts
from fairfleet.client.agent.task_data import DataMissing, TaskData
from fairfleet.common.errors import UsageError
from fairfleet.common.features import COUNTS
from fairfleet.proto.v1 import fleet_pb2 as pb

KNOWS_COUNTS = pb.JoinResponse(session="s", features=[COUNTS])


class FixedTask:
    """The data of a task, which never change."""

    device = "cpu"

    def __init__(self, samples: int) -> None:
        self.train_samples, self.test_samples = samples, 0


class GrowingTask(FixedTask):
    """Finds the next number of samples at each look; None is an error."""

    def __init__(self, *found: int | None) -> None:
        super().__init__(found[0] or 0)
        self.found = list(found[1:])

    def refresh(self) -> None:
        samples = self.found.pop(0)
        if samples is None:
            raise OSError("the disk is not there")
        self.train_samples = samples


class NotedConnection:
    """Notes what a client does with its connection."""

    def __init__(self, joined: pb.JoinResponse) -> None:
        self.joined, self.calls = joined, list[str]()
        self.counts = SampleCounts(pb.JoinRequest())

    def wait(self, seconds: float) -> None:
        self.calls.append(f"wait {seconds:g}")

    def disconnect(self, reason: str) -> None:
        self.calls.append(f"disconnect: {reason}")

    def reconnect(self) -> None:
        self.calls.append("reconnect")


def data_of(task: Any, joined: pb.JoinResponse) -> tuple[TaskData, NotedConnection]:
    connection: Any = NotedConnection(joined)
    return TaskData(task, connection, every_seconds=0.0), connection


def told(counts: SampleCounts, session: str, joined: pb.JoinResponse) -> dict[str, int]:
    """Return the numbers that a poll tells."""
    return counts.tell(session, joined, lambda session, **numbers: numbers)


def test_a_client_without_data_stays_away_from_a_server_that_would_select_it() -> None:
    data, connection = data_of(GrowingTask(0, 0, None, 7), pb.JoinResponse(session="s"))
    data.stay_away_while_missing()
    waits = ["wait 0"] * 3
    assert connection.calls == ["disconnect: no training data yet", *waits, "reconnect"]
    assert not data.is_missing


def test_a_client_without_data_stays_with_a_server_that_waits_for_it() -> None:
    data, connection = data_of(GrowingTask(0), KNOWS_COUNTS)
    data.stay_away_while_missing()
    assert connection.calls == []


def test_a_task_whose_data_can_never_arrive_is_refused() -> None:
    data, _ = data_of(FixedTask(0), KNOWS_COUNTS)
    with pytest.raises(UsageError, match=r"no training data .*refresh\(\)"):
        data.stay_away_while_missing()


def test_a_training_needs_data() -> None:
    data, _ = data_of(GrowingTask(5, 0, 6), KNOWS_COUNTS)
    with pytest.raises(DataMissing):
        data.refresh_for_training()
    data.refresh_for_training()


def test_an_error_while_looking_for_data_is_logged_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = GrowingTask(5, None, None, 8)
    data, _ = data_of(task, KNOWS_COUNTS)
    data.refresh_if_due()
    data.refresh_if_due()
    assert caplog.text.count("looking for new data failed") == 1
    data.refresh_if_due()
    assert task.train_samples == 8


def test_a_pause_ends_when_the_first_data_arrive() -> None:
    data, connection = data_of(GrowingTask(0, 0, 3, 4), KNOWS_COUNTS)
    data.wait(3600.0)
    assert connection.calls == ["wait 0"] * 2


def test_numbers_are_told_once_per_session_and_only_to_a_server_that_reads_them() -> None:
    join = pb.JoinRequest(train_samples=5)
    counts = SampleCounts(join)
    counts.joined("s")
    assert told(counts, "s", KNOWS_COUNTS) == {}
    counts.set(8, 2, KNOWS_COUNTS)
    assert told(counts, "s", pb.JoinResponse(session="s")) == {}
    assert told(counts, "s", KNOWS_COUNTS) == {"train_samples": 8, "test_samples": 2}
    assert told(counts, "s", KNOWS_COUNTS) == {}
    assert (join.train_samples, join.test_samples) == (8, 2)  # an older server learns by a Join


def test_numbers_that_a_failed_poll_carried_are_told_again() -> None:
    counts = SampleCounts(pb.JoinRequest())
    counts.joined("s")
    counts.set(8, 2, KNOWS_COUNTS)

    def fail(session: str, **numbers: int) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        counts.tell("s", KNOWS_COUNTS, fail)
    assert told(counts, "s", KNOWS_COUNTS) == {"train_samples": 8, "test_samples": 2}


def test_with_noised_reports_only_whether_there_are_data_is_told() -> None:
    private = pb.JoinResponse(session="s", features=[COUNTS])
    private.privacy.reports.noise_multiplier = 1.0
    counts = SampleCounts(pb.JoinRequest())
    counts.joined("s")
    counts.set(800, 20, private)
    assert told(counts, "s", private) == {"train_samples": 1, "test_samples": 1}
    counts.set(900, 20, private)
    assert told(counts, "s", private) == {}
