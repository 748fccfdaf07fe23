"""A client's process outlives what goes wrong with one task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairfleet.client.agent import Agent
from fairfleet.common.access import Access
from fairfleet.common.errors import BadRequest, Corrupted, NotKept, Refused, Superseded
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.e2e.tasks import quadratic

ASKED = pb.VerifyTask(id="0.0.verify", step=pb.Change(version=1, digest=b"step"), halvings=2)


def agent_whose_step_is(error: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, list[Any]]:
    """No server of ours sends a step that cannot be read, so the transfer fails by hand."""
    agent, told = Agent("ann", quadratic(size="3"), Access("127.0.0.1:1"), folder), list[Any]()

    def fail(step: pb.Change) -> None:
        raise error

    monkeypatch.setattr(agent._held, "fetch", lambda model: None)
    monkeypatch.setattr(agent._held, "fetch_step", fail)
    monkeypatch.setattr(agent._link, "report_verification", lambda **fields: told.append(fields))
    return agent, told


@pytest.mark.parametrize("error", [BadRequest("unknown codec"), Corrupted("not its digest")])
def test_a_step_that_cannot_be_read_is_reported_and_survived(
    error: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, told = agent_whose_step_is(error, tmp_path, monkeypatch)
    agent._verify(ASKED)
    assert [(one["losses"], one["failure"]) for one in told] == [([], f"{type(error).__name__}: {error}")]


def test_a_step_that_is_no_longer_wanted_needs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, told = agent_whose_step_is(NotKept("taken"), tmp_path, monkeypatch)
    agent._verify(ASKED)
    assert told == []


def test_a_client_that_was_taken_over_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = agent_whose_step_is(Superseded("another"), tmp_path, monkeypatch)
    with pytest.raises(Superseded):
        agent._verify(ASKED)
