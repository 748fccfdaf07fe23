"""Missed selections are the same in memory and after a restart, and surplus ones do not count."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.rounds.attendance import Attendance, AttendanceBook
from fairfleet.server.rounds.selection import Candidate, least_recent
from fairfleet.server.rounds.state_machine import ClientsChosen, Round
from fairfleet.server.storage.client_queries import recorded_attendance
from fairfleet.server.storage.round_record import RoundRecord
from fairfleet.server.storage.store import Store, StoredModel, StoredUpdate

CLIENTS = "abcd"
OUTCOMES = st.sampled_from(("delivers", "misses", "surplus"))
REPORT = TrainReport(samples=1, loss_before=1.0, loss_after=0.0, steps=1, learning_rate=0.1)


def test_a_selection_counts_as_missed_until_the_client_delivers_or_is_not_needed() -> None:
    book = AttendanceBook()
    book.select("ab", 0)
    book.select("a", 0)  # again in the same round
    assert book.of("a") == book.of("b") == Attendance(0, missed=1)
    book.deliver("a")
    book.spare("bc", 0)  # c was not even selected
    assert book.of("a") == book.of("b") == Attendance(0)
    assert book.of("c") == Attendance()
    for number in (1, 2, 3):
        book.select("b", number)
    book.spare("b", 3)
    assert book.of("b") == Attendance(3, missed=2)
    book.deliver("b")
    assert book.of("b") == Attendance(3)
    assert AttendanceBook.load(book.dump()).dump() == book.dump()


def test_clients_that_are_always_surplus_keep_their_share_of_selections() -> None:
    """Each round selects 3 of 6 clients and uses the first 2; two slow clients are never first."""
    book, chosen_times = AttendanceBook(), Counter[str]()
    for number in range(120):
        chosen = least_recent(
            [Candidate(c, 1, None, None, *book.of(c)) for c in "abcdXY"], 3, (0, number)
        )
        chosen_times.update(chosen)
        fastest = sorted(chosen - {"X", "Y"})[:2]
        book.select(chosen, number)
        book.deliver(fastest)
        book.spare(chosen - set(fastest), number)
    assert set(chosen_times.values()) == {60}


@pytest.mark.slow
@given(
    st.lists(
        st.dictionaries(st.sampled_from(CLIENTS), st.tuples(OUTCOMES, st.integers(0, 1))),
        max_size=8,
    )
)
def test_a_restarted_server_restores_missed_selections(
    rounds: list[dict[str, tuple[str, int]]],
) -> None:
    """Each round has an outcome per client, and whether it is selected in both attempts."""
    book = AttendanceBook()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.create("test", Model.of({"w": np.zeros(1, np.float32)}), bytes(32))
        for number, behaviour in enumerate(rounds):
            again = frozenset(client for client, (_, twice) in behaviour.items() if twice)
            outcomes = {client: outcome for client, (outcome, _) in behaviour.items()}
            keep_round(store, number, [frozenset(behaviour), again], outcomes)
            for chosen in (frozenset(behaviour), again):
                book.select(chosen, number)
            book.deliver(client for client, outcome in outcomes.items() if outcome == "delivers")
            book.spare(
                [client for client, outcome in outcomes.items() if outcome == "surplus"], number
            )
        assert recorded_attendance(store).dump() == book.dump()
        store.close()


def keep_round(
    store: Store, number: int, attempts: list[frozenset[str]], outcomes: dict[str, str]
) -> None:
    """Store a committed round as the server does."""
    facts = [
        (Round(number), ClientsChosen(chosen, len(chosen)), Round(number))
        for chosen in attempts
        if chosen
    ]
    delivering = [client for client, outcome in outcomes.items() if outcome == "delivers"]
    updates = [
        StoredUpdate(number, client, bytes(32), "raw32", 8, REPORT, None) for client in delivering
    ]
    surplus = sorted(client for client, outcome in outcomes.items() if outcome == "surplus")
    record = RoundRecord(number, bytes(32), (), {}, unix_seconds=0.0, surplus=tuple(surplus))
    model = StoredModel(number + 1, bytes(32), "models/x")
    commit = store.commit_writes(model, lambda: record, keep=2)
    store.record(
        facts, Round(number + 1), *(store.update_write(update) for update in updates), commit
    )
