"""Calls under way can be ended: at work, while a message is being sent, and when the peer does not even read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fairfleet.common.errors import NotAllowed, Revoked
from fairfleet.common.identity import Identity, Role
from fairfleet.server import callers
from fairfleet.server.callers import OpenCalls, caller, check_speaks_for

ANN, BOB = Identity(Role.CLIENT, "ann"), Identity(Role.CLIENT, "bob")


async def at_work(calls: OpenCalls, who: Identity) -> None:
    with calls.of(who):
        await asyncio.sleep(60)


async def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


def test_a_call_at_work_ends_with_the_reason_and_others_go_on() -> None:
    async def story() -> None:
        calls = OpenCalls()
        ann, bob = await begun(at_work(calls, ANN)), await begun(at_work(calls, BOB))
        calls.end(ANN, "stolen")
        with pytest.raises(Revoked, match="stolen"):
            await ann
        assert not bob.done()
        bob.cancel()
        with pytest.raises(asyncio.CancelledError):  # a peer that hung up is no revocation
            await bob

    asyncio.run(story())


def test_a_call_that_is_sending_ends_when_the_message_is_out() -> None:
    async def story() -> None:
        calls, out = OpenCalls(), asyncio.Event()

        async def sending() -> None:
            with calls.of(ANN) as call:
                with call.sending():
                    await out.wait()
                raise AssertionError("another message")

        task = await begun(sending())
        calls.end(ANN, "stolen")
        await asyncio.sleep(0)
        assert not task.done()
        out.set()
        with pytest.raises(Revoked, match="stolen"):
            await task

    asyncio.run(story())


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "CUT_SECONDS", 0.01)

    async def story() -> None:
        calls = OpenCalls()

        async def stuck() -> None:
            with calls.of(ANN) as call, call.sending():
                await asyncio.sleep(60)

        task = await begun(stuck())
        calls.end(ANN, "stolen")
        with pytest.raises(Revoked, match="stolen"):
            await asyncio.wait_for(task, 30)

    asyncio.run(story())


def test_who_ends_its_own_calls_finishes_this_one() -> None:
    async def story() -> None:
        calls = OpenCalls()
        with calls.of(ANN):
            calls.end(ANN, "by itself")
            await asyncio.sleep(0)
        assert not calls._calls

    asyncio.run(story())


def test_a_certificate_speaks_for_its_own_client_and_in_the_clear_everybody_for_all() -> None:
    async def as_(who: Identity | None, client: str) -> None:
        caller.set(who)
        check_speaks_for(client, "it would")

    asyncio.run(as_(ANN, "ann"))
    asyncio.run(as_(None, "anybody"))
    for who, client in ((BOB, "ann"), (Identity(Role.OPERATOR, "ann"), "ann")):
        with pytest.raises(NotAllowed, match="cannot speak for another"):
            asyncio.run(as_(who, client))
