"""A client's process outlives what goes wrong with one task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairfleet.client.agent import Agent
from fairfleet.common import wire
from fairfleet.common.access import Access
from fairfleet.common.errors import BadRequest, Corrupted, NotKept, Refused, Superseded, UsageError
from fairfleet.common.privacy import ReportTerms, Terms
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.e2e.tasks import plain, quadratic

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


# ---- privacy -----------------------------------------------------------------------------------

MADE = Terms(clip=1.0, noise_multiplier=1.0)
REPORTS = ReportTerms(noise_multiplier=1.0, loss_bound=5.0, gradient_bound=5.0)


def agent_with_an_unsent_update(folder: Path, least_noise: float, link: Any) -> Agent:
    """Made with MADE; what it lost to its codec waits for news of it."""
    agent = Agent("ann", plain(), Access("127.0.0.1:1"), folder, least_noise=least_noise)
    zeros, report = (
        agent.task.initial_model(),
        TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=1),
    )
    trained = Model.of({name: array - 0.3 for name, array in zeros.named().items()})
    named = {"federation": "f", "round": 0, "model_digest": "00", "codec": "int8", "error_feedback": True}
    agent._spool.write(zeros, trained, report, terms=MADE, **named)
    assert agent._spool.unsettled("f")
    agent._link = link
    return agent


class Recorder:
    """A link that writes down what it is told, of a server with these terms."""

    stopped = False

    def __init__(self, privacy: pb.Privacy | None = None) -> None:
        self.joined = pb.JoinResponse(federation="f", privacy=privacy)
        self.told: list[dict[str, Any]] = []

    def federation(self) -> str:
        return "f"

    def open_upload(self, **fields: Any) -> pb.OpenUploadResponse:
        self.told.append(fields)
        return pb.OpenUploadResponse(receipt=pb.Receipt(outcome=pb.OUTCOME_IGNORED, durable=True))

    def heartbeat(self, **fields: Any) -> pb.HeartbeatResponse:
        self.told.append(fields)
        return pb.HeartbeatResponse()

    report_evaluation = report_verification = heartbeat


@pytest.mark.parametrize(
    ("least_noise", "asked", "goes"),
    [
        (0.0, Terms(), True),
        (1.0, MADE, True),
        (0.0, MADE.model_copy(update={"clip": 2.0}), True),
        (1.5, MADE, False),  # it insists on more by now
        (0.0, MADE.model_copy(update={"noise_multiplier": 2.0}), False),  # the server does
        (0.0, MADE.model_copy(update={"clip": 0.5}), False),
        (0.0, MADE.model_copy(update={"reports": REPORTS}), False),
    ],
)
def test_an_unsent_update_with_less_noise_than_is_wanted_by_now_is_not_even_announced(
    tmp_path: Path, least_noise: float, asked: Terms, goes: bool
) -> None:
    for settle in ("at the start", "before the next"):
        link = Recorder(wire.privacy_out(asked))
        agent = agent_with_an_unsent_update(tmp_path, least_noise, link)
        agent._send_left() if settle == "at the start" else agent._settle("f", asked)
        assert bool(link.told) is goes, settle
        assert all(wire.privacy_in(one["privacy"]) == MADE for one in link.told)
        agent._settle("f", asked)
        assert bool(link.told) is goes
        assert agent._spool.left("f") is None  # and makes room


@pytest.mark.parametrize(
    "privacy", [pb.Privacy(noise_multiplier=9.0), pb.Privacy(clip=1, noise_multiplier=float("nan"))]
)
def test_terms_that_only_look_like_noise_deceive_nobody(tmp_path: Path, privacy: pb.Privacy) -> None:
    agent = Agent("ann", plain(), Access("127.0.0.1:1"), tmp_path, least_noise=1.0)
    with pytest.raises(BadRequest, match="the terms of privacy are not usable"):
        agent._insist_on_noise(privacy)


@pytest.mark.parametrize("kind", ["train", "evaluate", "verify"])
def test_a_client_that_insists_on_noise_does_nothing_for_a_server_that_asks_for_less(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent("ann", plain(), Access("127.0.0.1:1"), tmp_path, least_noise=1.0)
    task = pb.NextTaskResponse()
    getattr(task, kind).id = "0.0.x"
    monkeypatch.setattr(agent._held, "next_task", lambda: task)
    monkeypatch.setattr(agent._link, "federation", lambda: "f")
    with pytest.raises(UsageError, match="gives none with less than 1"):
        agent.run()


@pytest.mark.parametrize(
    ("privacy", "told"), [(None, "ValueError: row 7 of ann's diary"), (pb.Privacy(), "ValueError")]
)
def test_with_privacy_a_failed_task_tells_the_server_no_more_than_the_kind_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: pb.Privacy | None, told: str
) -> None:
    agent, link = Agent("ann", plain(), Access("127.0.0.1:1"), tmp_path), Recorder(privacy)

    def fail(*_: Any) -> None:
        raise ValueError("row 7 of ann's diary")

    for owner, name in ((agent, "_train"), (agent._heartbeat, "during"), (agent._held, "fetch_step")):
        monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(agent._held, "fetch", lambda model: None)
    agent._link = link  # type: ignore[assignment]
    agent._attempt(pb.TrainTask(id="0.0.train"))
    agent._evaluate(pb.EvaluateTask(id="0.0.evaluate"))
    agent._verify(ASKED)
    assert [one["failure"] for one in link.told if "failure" in one] == [told] * 3
