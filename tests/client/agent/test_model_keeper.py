"""What a participant keeps of the models that it receives."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairfleet.client.agent import model_keeper
from fairfleet.client.agent.fleet_session import Stopped
from fairfleet.client.agent.model_keeper import ModelKeeper
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
    path: Path | None,
    models: Any,
    terms: int = pb.KEPT_MODELS_UNSPECIFIED,
    task: Any = None,
    name: str = "ann",
) -> ModelKeeper:
    joined = pb.JoinResponse(federation="birds", kept_models=terms)
    connection: Any = SimpleNamespace(
        joined=joined, counters=SimpleNamespace(received_bytes=0), stop=lambda: None
    )
    return ModelKeeper(name, task or peaked("2"), path, connection, models)


def test_an_older_server_without_a_result_leaves_the_last_received_model(tmp_path: Path) -> None:
    file = tmp_path / "saved.safetensors"
    keeper(file, Download()).finished(pb.Finished(reason="all rounds are done"))
    model, metadata = Model.load(file)
    assert (model.parameters == 7).all()
    assert (metadata["version"], metadata["federation_id"]) == ("7", "")


def test_a_result_that_cannot_be_fetched_leaves_the_file_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "saved.safetensors"
    own = keeper(file, Download(NotKept("version 2 is not published")))
    own.evaluated()
    own.finished(pb.Finished(model=pb.ModelRef(version=2, digest=DIGEST)))
    assert Model.load(file)[1]["version"] == "7"
    assert "version 2, the federation's result, could not be fetched" in caplog.text


def test_a_server_that_ended_before_the_result_came_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_keeper, "STALL_SECONDS", 0.01)
    stopped = threading.Event()

    class Stalled(Download):
        def fetch(self, ref: pb.ModelRef) -> None:
            assert stopped.wait(20)
            raise Stopped

    own = keeper(tmp_path / "saved.safetensors", Stalled())
    own._connection.stop = stopped.set  # type: ignore[method-assign]
    own.finished(pb.Finished(model=pb.ModelRef(version=2, digest=DIGEST)))
    assert "could not be fetched (the server does not answer)" in caplog.text


def test_a_person_who_stops_the_client_while_the_result_comes_reads_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = keeper(tmp_path / "saved.safetensors", Download(Stopped()))
    with pytest.raises(Stopped):
        own.finished(pb.Finished(model=pb.ModelRef(version=2, digest=DIGEST)))
    assert not caplog.text


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
        (99, []),  # of a newer server
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


def test_a_task_gets_the_model_although_the_file_cannot_be_written(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "gone"
    folder.mkdir()
    own = keeper(folder / "saved", Download(), task=peaked("2", trace=str(trace)))
    folder.rmdir()
    own.evaluated()
    with pytest.raises(UsageError):
        own.finished(pb.Finished())
    assert trace.read_text().splitlines() == ["7 7", "7 7"]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    link, file = tmp_path / "newest", tmp_path / "store" / "model.safetensors"
    file.parent.mkdir()
    link.symlink_to(file)
    keeper(link, Download()).evaluated()
    assert link.is_symlink()
    assert Model.load(file)[1]["version"] == "7"


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is not a regular file"):
        keeper(pipe, Download())


def test_a_process_that_is_killed_again_and_again_leaves_one_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of different names use different ones: they may write the same file."""
    temporary_files = set[Path]()
    monkeypatch.setattr(
        model_keeper,
        "write_atomically",
        lambda path, save, temp_suffix: temporary_files.add(
            path.with_name(path.name + temp_suffix)
        ),
    )
    for process, name, count in ((1, "ann", 1), (2, "ann", 1), (2, "bob", 2)):
        monkeypatch.setattr(os, "getpid", lambda number=process: number)
        keeper(tmp_path / "saved", Download(), name=name).evaluated()
        assert len(temporary_files) == count


def test_a_client_that_has_no_model_at_the_end_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It joined when an older server had finished."""
    models = Download()
    models.held = None
    keeper(tmp_path / "saved", models).finished(pb.Finished())
    assert "there is no model to keep" in caplog.text


def test_a_client_says_that_it_does_not_know_the_terms_of_a_newer_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper(tmp_path / "saved", Download(), 99).explain_terms()
    assert "not known to this version" in caplog.text
    assert "is not written" in caplog.text


def test_a_name_that_no_file_can_have_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: File name too long"):
        keeper(tmp_path / ("x" * 300), Download())
