"""What a participant keeps of the models that it receives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairfleet.client.agent import model_keeper
from fairfleet.client.agent.model_keeper import ModelKeeper
from fairfleet.client.agent.server_connection import Stopped
from fairfleet.common.errors import NotKept, UsageError
from fairfleet.common.tensors import Arrays, Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.tasks import peaked

DIGEST = bytes(32)


class Download:
    """Stands for the cache of models; `fetch` replaces its model by version 2, or fails."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.received = Model.of({"weight": np.full(3, 7.0, np.float32)})
        self.held: tuple[int, bytes] | None = (7, DIGEST)
        self._problem = problem

    def fetch(self, ref: pb.ModelRef) -> None:
        self.held = None
        if self._problem:
            raise self._problem
        self.received.parameters[:] = ref.version
        self.held = (ref.version, ref.digest)


def keeper(
    path: Path | None, models: Any, terms: int = pb.KEPT_MODELS_UNSPECIFIED, task: Any = None
) -> ModelKeeper:
    joined = pb.JoinResponse(federation="birds", kept_models=terms)
    connection: Any = SimpleNamespace(
        joined=joined, counters=SimpleNamespace(received_bytes=0), stop=lambda: None
    )
    return ModelKeeper(task or peaked("2"), path, connection, models)


def test_an_older_server_without_a_result_leaves_the_last_received_model(tmp_path: Path) -> None:
    file = tmp_path / "saved.safetensors"
    keeper(file, Download()).finished(pb.Finished(reason="all rounds are done"))
    model, metadata = Model.load(file)
    assert (model.parameters == 7).all()
    assert (metadata["version"], metadata["federation_id"]) == ("7", "")


@pytest.mark.parametrize("problem", [NotKept("version 2 is not published"), Stopped()])
def test_a_result_that_cannot_be_fetched_leaves_the_file_as_it_was(
    tmp_path: Path, problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "saved.safetensors"
    models = Download(problem)
    own = keeper(file, models)
    own.evaluated()
    own.finished(pb.Finished(model=pb.ModelRef(version=2, digest=DIGEST)))
    assert Model.load(file)[1]["version"] == "7"
    assert "version 2, the federation's result, could not be fetched" in caplog.text


def test_a_server_that_ended_before_the_result_came_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_keeper, "STALL_SECONDS", 0.01)
    own = keeper(tmp_path / "saved.safetensors", Download())
    stopped: list[bool] = []
    own._connection.stop = lambda: stopped.append(True)  # type: ignore[method-assign]
    with own._stopping_when_stalled():
        while not stopped:
            pass
    assert stopped == [True]


def test_a_file_that_cannot_be_written_at_the_end_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    own = keeper(folder / "saved.safetensors", Download())
    folder.rmdir()
    own.evaluated()  # logged only
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        own.finished(pb.Finished())


def test_a_task_cannot_change_the_model_that_it_gets() -> None:
    models = Download()

    class Greedy(type(peaked("2"))):  # type: ignore[misc]
        def on_model(self, version: int, model: Arrays) -> None:
            model["weight"][0] = 1.0

    task = Greedy(1.0, 3, 10, 1, 0.0, "", 0.0, 0.5, 10)
    keeper(None, models, task=task).evaluated()
    assert (models.received.parameters == 7).all()


@pytest.mark.parametrize(
    ("terms", "kept"),
    [
        (pb.KEPT_MODELS_UNSPECIFIED, [7, 2]),
        (pb.KEPT_MODELS_RECEIVED, [7, 2]),
        (pb.KEPT_MODELS_FINAL, [2]),
        (pb.KEPT_MODELS_NONE, []),
    ],
)
def test_the_terms_say_which_models_a_task_gets(
    tmp_path: Path, terms: int, kept: list[int]
) -> None:
    trace = tmp_path / "trace"
    trace.touch()
    own = keeper(None, Download(), terms, peaked("2", trace=str(trace)))
    own.evaluated()
    own.finished(pb.Finished(model=pb.ModelRef(version=2, digest=DIGEST)))
    assert [int(line.split()[0]) for line in trace.read_text().splitlines()] == kept
