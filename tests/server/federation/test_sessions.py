"""Sessions: which process acts for a client, and for how long."""

from __future__ import annotations

import contextlib

import pytest

from fairfleet.common.errors import ContestedIdentity, LimitReached, SessionUnknown, Superseded
from fairfleet.server.federation.clients.sessions import (
    TAKEOVERS_ALLOWED,
    ClientDescription,
    Sessions,
)


def member(client: str = "a", instance: str = "1", since: int = 0) -> ClientDescription:
    return ClientDescription(client, instance, "cpu", 10, 10, ("raw32",), since=since)


def sessions(limit: int = 10) -> Sessions:
    return Sessions(lease_seconds=30, limit=limit, boot=1)


def test_a_call_renews_the_lease_and_silence_ends_it() -> None:
    fleet = sessions()
    session = fleet.join(member(), now=0)
    fleet.of(session.id, now=25)
    assert fleet.expired(now=54) == []
    assert fleet.expired(now=56) == [session]
    session.polls = 1
    assert fleet.expired(now=1000) == [], "a waiting poll is a sign of life"


def test_another_process_takes_over_and_the_older_is_informed() -> None:
    fleet = sessions()
    older = fleet.join(member(instance="1"), now=0)
    newer = fleet.join(member(instance="2"), now=1)
    assert newer.fence > older.fence
    with pytest.raises(Superseded):
        fleet.of(older.id, now=2)
    assert fleet.of(newer.id, now=2) is newer
    with pytest.raises(SessionUnknown):
        fleet.of("never heard of", now=2)


def test_a_process_that_joins_again_does_not_take_over_from_itself() -> None:
    fleet = sessions()
    older, newer = fleet.join(member(), now=0), fleet.join(member(), now=1)
    with pytest.raises(SessionUnknown):
        fleet.of(older.id, now=2)
    assert fleet.of(newer.id, now=2) is newer


def test_two_processes_that_alternate_leave_the_name_with_its_holder() -> None:
    fleet = sessions()
    for turn in range(TAKEOVERS_ALLOWED + 1):
        holder = fleet.join(member(instance=str(turn % 2)), now=turn)
    with pytest.raises(ContestedIdentity):
        fleet.join(member(instance="another"), now=5)
    assert fleet.of(holder.id, now=6) is holder
    assert fleet.join(member(instance="another"), now=100).fence > holder.fence


def test_the_name_of_a_client_that_left_is_free_immediately() -> None:
    fleet = sessions()
    for turn in range(20):
        fleet.remove(fleet.join(member(instance=str(turn)), now=turn))
    fleet.join(member(), now=20)


def test_a_full_fleet_admits_returning_clients_only() -> None:
    fleet = sessions(limit=2)
    fleet.join(member("a"), now=0)
    fleet.join(member("b"), now=0)
    with pytest.raises(LimitReached, match="2 clients"):
        fleet.join(member("c"), now=0)
    fleet.join(member("a"), now=1)


def test_fences_grow_over_restarts() -> None:
    before, after = Sessions(30, 10, boot=1), Sessions(30, 10, boot=2)
    assert after.join(member(), 0).fence > max(before.join(member(), 0).fence for _ in range(100))


def test_a_process_that_lost_its_session_does_not_take_over_from_a_newer_one() -> None:
    for silent in (False, True):  # Whether its lease had expired when the other process joined.
        fleet = sessions()
        older = fleet.join(member(instance="1"), now=0)
        if silent:
            fleet.remove(older)
        newer = fleet.join(member(instance="2"), now=1)
        with pytest.raises(Superseded):
            fleet.join(member(instance="1", since=older.fence), now=2)
        assert fleet.of(newer.id, now=3) is newer
        fleet.join(
            member(instance="2", since=newer.fence), now=4
        )  # The new process may lose its connection as well.


def test_the_newer_process_acts_for_a_client_also_after_a_server_restart() -> None:
    before = Sessions(30, 10, boot=1)
    older, newer = (before.join(member(instance=instance), now=0).fence for instance in "12")
    for order in ("12", "21"):
        restarted, since = Sessions(30, 10, boot=2), {"1": older, "2": newer}
        for instance in order:
            with contextlib.suppress(Superseded):
                restarted.join(member(instance=instance, since=since[instance]), now=0)
        holder = restarted.get("a")
        assert holder is not None
        assert holder.member.instance == "2", order
