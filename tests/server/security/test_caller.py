"""Open calls can be ended: at work, while a message is sent, and when the peer does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fairfleet.common.errors import NotAllowed, Revoked
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.server.security import caller as callers
from fairfleet.server.security.caller import OpenCalls, caller, check_speaks_for

ANN, BOB = Identity(Role.CLIENT, "ann"), Identity(Role.CLIENT, "bob")


async def work_in_call(calls: OpenCalls, who: Identity) -> None:
    """Stay in a call of this identity for a minute."""
    with calls.of(who):
        await asyncio.sleep(60)


async def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Return a task that has run up to its first wait."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


def test_a_working_call_ends_with_the_reason_and_other_identities_continue() -> None:
    async def scenario() -> None:
        calls = OpenCalls()
        ann, bob = await begin(work_in_call(calls, ANN)), await begin(work_in_call(calls, BOB))
        calls.end(ANN, "stolen")
        with pytest.raises(Revoked, match="stolen"):
            await ann
        assert not bob.done()
        bob.cancel()
        with pytest.raises(asyncio.CancelledError):  # a peer that hung up was not revoked
            await bob

    asyncio.run(scenario())


def test_a_sending_call_ends_after_the_message_is_sent() -> None:
    async def scenario() -> None:
        calls, message_sent = OpenCalls(), asyncio.Event()

        async def sending() -> None:
            with calls.of(ANN) as call:
                with call.sending():
                    await message_sent.wait()
                raise AssertionError("another message")

        task = await begin(sending())
        calls.end(ANN, "stolen")
        await asyncio.sleep(0)
        assert not task.done()
        message_sent.set()
        with pytest.raises(Revoked, match="stolen"):
            await task

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "CUT_SECONDS", 0.01)

    async def scenario() -> None:
        calls = OpenCalls()

        async def stuck() -> None:
            with calls.of(ANN) as call, call.sending():
                await asyncio.sleep(60)

        task = await begin(stuck())
        calls.end(ANN, "stolen")
        with pytest.raises(Revoked, match="stolen"):
            await asyncio.wait_for(task, 30)

    asyncio.run(scenario())


def test_a_call_that_ends_all_calls_of_its_identity_finishes_itself() -> None:
    async def scenario() -> None:
        calls = OpenCalls()
        with calls.of(ANN):
            calls.end(ANN, "by itself")
            await asyncio.sleep(0)
        assert not calls._calls

    asyncio.run(scenario())


def test_a_certificate_speaks_for_its_own_client_and_without_tls_any_peer_for_all() -> None:
    async def check_as(who: Identity | None, client: str) -> None:
        caller.set(who)
        check_speaks_for(client, "it would")

    asyncio.run(check_as(ANN, "ann"))
    asyncio.run(check_as(None, "anybody"))
    for who, client in ((BOB, "ann"), (Identity(Role.OPERATOR, "ann"), "ann")):
        with pytest.raises(NotAllowed, match="cannot speak for another"):
            asyncio.run(check_as(who, client))
