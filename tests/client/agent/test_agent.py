"""A client's process survives a failure of one task, and reveals no more than its owner allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairfleet.client.agent.agent import Agent
from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.agent.uploader import UpdateUploader
from fairfleet.client.privacy import Allowance, ReleaseLedger
from fairfleet.client.update.spool import Spool
from fairfleet.common import wire
from fairfleet.common.errors import BadRequest, Corrupted, NotKept, Refused, Superseded, UsageError
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.privacy import PrivacyTerms, ReportTerms
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.tasks import plain, quadratic

REQUEST = pb.VerifyTask(id="0.0.verify", step=pb.Change(version=1, digest=b"step"), halvings=2)


def agent_whose_step_fails_with(
    error: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Agent, list[Any]]:
    """Return an agent that cannot fetch a step, and the list of its reports.

    No server of ours sends a step that cannot be read, so the transfer is replaced.
    """
    agent = Agent("ann", quadratic(size="3"), ServerAccess("127.0.0.1:1"), folder)
    reports = list[Any]()

    def fail(step: pb.Change) -> None:
        raise error

    monkeypatch.setattr(agent._models, "fetch", lambda model: None)
    monkeypatch.setattr(agent._models, "fetch_step", fail)
    monkeypatch.setattr(
        agent._connection, "report_verification", lambda **fields: reports.append(fields)
    )
    return agent, reports


@pytest.mark.parametrize("error", [BadRequest("unknown codec"), Corrupted("not its digest")])
def test_a_step_that_cannot_be_read_is_reported_and_survived(
    error: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, reports = agent_whose_step_fails_with(error, tmp_path, monkeypatch)
    agent._verify(REQUEST)
    results = [(report["losses"], report["failure"]) for report in reports]
    assert results == [([], type(error).__name__)]


def test_a_step_that_is_no_longer_needed_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, reports = agent_whose_step_fails_with(NotKept("taken"), tmp_path, monkeypatch)
    agent._verify(REQUEST)
    assert reports == []


@pytest.mark.parametrize(("halvings", "allowed"), [(64, True), (65, False), (2**32 - 1, False)])
def test_a_client_tries_no_step_at_more_lengths_than_the_protocol_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halvings: int, allowed: bool
) -> None:
    agent = Agent("ann", quadratic(size="3"), ServerAccess("127.0.0.1:1"), tmp_path)
    connection, tried = RecordingConnection(), list[Any]()
    model = agent.task.initial_model()
    monkeypatch.setattr(agent._models, "fetch", lambda model: None)
    monkeypatch.setattr(type(agent._models), "received", model)
    monkeypatch.setattr(agent._models, "fetch_step", lambda step: model)

    def training_loss(arrays: Any) -> float:
        tried.append(arrays)
        return 1.0

    monkeypatch.setattr(agent.task, "training_loss", training_loss)
    agent._connection = connection  # type: ignore[assignment]
    agent._verify(pb.VerifyTask(id="0.0.verify", step=REQUEST.step, halvings=halvings))
    (report,) = connection.requests
    assert len(tried) == len(report["losses"]) == (halvings + 1 if allowed else 0)
    assert report["failure"] == ("" if allowed else "BadRequest")


def test_a_client_that_was_superseded_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = agent_whose_step_fails_with(Superseded("another"), tmp_path, monkeypatch)
    with pytest.raises(Superseded):
        agent._verify(REQUEST)


# ---- privacy -----------------------------------------------------------------------------------

APPLIED = PrivacyTerms(clip=1.0, noise_multiplier=1.0)
REPORTS = ReportTerms(noise_multiplier=1.0, loss_bound=5.0, gradient_bound=5.0)


class RecordingConnection:
    """A connection that records its requests, to a server with these privacy terms."""

    stopped = False

    def __init__(self, privacy: pb.Privacy | None = None) -> None:
        self.joined = pb.JoinResponse(federation="f", privacy=privacy)
        self.requests: list[dict[str, Any]] = []

    def open_upload(self, **fields: Any) -> pb.OpenUploadResponse:
        self.requests.append(fields)
        return pb.OpenUploadResponse(receipt=pb.Receipt(outcome=pb.OUTCOME_IGNORED, durable=True))

    def heartbeat(self, **fields: Any) -> pb.HeartbeatResponse:
        self.requests.append(fields)
        return pb.HeartbeatResponse()

    report_evaluation = report_verification = heartbeat


def spool_with_an_unsent_update(folder: Path) -> Spool:
    """Return a spool with an update under APPLIED, whose residual waits for a receipt."""
    spool, zeros = Spool(folder), plain().initial_model()
    report = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=1)
    trained = Model.of({name: array - 0.3 for name, array in zeros.named().items()})
    spool.write(
        zeros,
        trained,
        report,
        terms=APPLIED,
        federation="f",
        round_number=0,
        model_digest="00",
        codec="int8",
        error_feedback=True,
    )
    assert spool.unsettled("f")
    return spool


@pytest.mark.parametrize("when", ["at the start", "before the next"])
@pytest.mark.parametrize(
    ("least_noise", "requested", "is_announced"),
    [
        (0.0, PrivacyTerms(), True),
        (1.0, APPLIED, True),
        (0.0, APPLIED.model_copy(update={"clip": 2.0}), True),
        (1.5, APPLIED, False),  # the client now requires more
        (0.0, APPLIED.model_copy(update={"noise_multiplier": 2.0}), False),  # the server does
        (0.0, APPLIED.model_copy(update={"clip": 0.5}), False),
        (0.0, APPLIED.model_copy(update={"reports": REPORTS}), False),
    ],
)
def test_an_unsent_update_with_less_noise_than_now_required_is_not_even_announced(
    tmp_path: Path, least_noise: float, requested: PrivacyTerms, is_announced: bool, when: str
) -> None:
    connection = RecordingConnection(wire.privacy_out(requested))
    spool = spool_with_an_unsent_update(tmp_path)
    uploader = UpdateUploader(
        connection,  # type: ignore[arg-type]
        spool,
        ClientCounters(),
        Allowance(ReleaseLedger(tmp_path)),
        least_noise,
    )
    if when == "at the start":
        uploader.send_unsent()
    else:
        uploader.settle("f", requested)
    assert bool(connection.requests) is is_announced
    assert all(wire.privacy_in(fields["privacy"]) == APPLIED for fields in connection.requests)
    uploader.settle("f", requested)
    assert bool(connection.requests) is is_announced
    assert spool.find_unsent("f") is None  # there is room for the next one


@pytest.mark.parametrize("least_noise", [0.5, 1.5])
def test_an_agent_applies_its_least_noise_to_unsent_updates(
    tmp_path: Path, least_noise: float
) -> None:
    spool_with_an_unsent_update(tmp_path)
    agent = Agent("ann", plain(), ServerAccess("127.0.0.1:1"), tmp_path, least_noise=least_noise)
    connection = RecordingConnection(wire.privacy_out(APPLIED))
    agent._uploader._connection = connection  # type: ignore[assignment]
    agent._uploader.send_unsent()
    assert bool(connection.requests) is (least_noise <= APPLIED.noise_multiplier)


@pytest.mark.parametrize(
    "privacy", [pb.Privacy(noise_multiplier=9.0), pb.Privacy(clip=1, noise_multiplier=float("nan"))]
)
def test_privacy_terms_that_add_no_noise_are_refused(tmp_path: Path, privacy: pb.Privacy) -> None:
    agent = Agent("ann", plain(), ServerAccess("127.0.0.1:1"), tmp_path, least_noise=1.0)
    with pytest.raises(BadRequest, match="the terms of privacy are not usable"):
        agent._require_noise(privacy)


@pytest.mark.parametrize("kind", ["train", "evaluate", "verify"])
def test_a_client_that_requires_noise_does_nothing_for_a_server_that_requests_less(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent("ann", plain(), ServerAccess("127.0.0.1:1"), tmp_path, least_noise=1.0)
    task = pb.NextTaskResponse()
    getattr(task, kind).id = "0.0.x"
    monkeypatch.setattr(agent._models, "next_task", lambda: task)
    joined = pb.JoinResponse(federation="f")
    monkeypatch.setattr(agent._connection, "enter", lambda: joined)
    with pytest.raises(UsageError, match="sends none with less than 1"):
        agent.run()


@pytest.mark.parametrize(
    ("opted_in", "privacy", "text"),
    [
        (False, None, "ValueError"),
        (True, None, "ValueError: row 7 of ann's diary"),
        (False, pb.Privacy(), "ValueError"),
        (True, pb.Privacy(), "ValueError"),
    ],
)
def test_the_server_learns_the_type_of_an_error_and_its_text_only_if_the_owner_opted_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opted_in: bool,
    privacy: pb.Privacy | None,
    text: str,
) -> None:
    agent = Agent("ann", plain(), ServerAccess("127.0.0.1:1"), tmp_path, send_error_text=opted_in)
    connection = RecordingConnection(privacy)

    def fail(*_: Any) -> None:
        raise ValueError("row 7 of ann's diary")

    for owner, name in (
        (agent, "_train"),
        (agent._heartbeat, "during"),
        (agent._models, "fetch_step"),
    ):
        monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(agent._models, "fetch", lambda model: None)
    agent._connection = connection  # type: ignore[assignment]
    agent._attempt(pb.TrainTask(id="0.0.train"))
    agent._evaluate(pb.EvaluateTask(id="0.0.evaluate"))
    agent._verify(REQUEST)
    failures = [fields["failure"] for fields in connection.requests if "failure" in fields]
    assert failures == [text] * 3
