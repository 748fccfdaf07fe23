"""One upload: resumable, finished once, and given up permanently."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.chunk_stream import encode, model_pieces, write_record
from fairfleet.common.errors import Corrupted, OutOfOrder, WrongState
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.transfer.upload import AnnouncedUpdate, Upload, tag_of
from fairfleet.server.transfer.upload_lock import UploadLock, Work


def new_upload(
    path: Path | None, lock: UploadLock | None = None, codec: str = "raw32"
) -> tuple[Upload, list[bytes]]:
    """Return a new upload and its messages."""
    model, messages = Model.of({"w": np.ones(10, np.float32)}), list[bytes]()
    encoded = encode(
        model_pieces(model), lambda head, data: messages.append(b"".join((head, data)))
    )
    report = TrainReport(samples=1, loss_before=1.0, loss_after=1.0, steps=1, learning_rate=0.1)
    announced = AnnouncedUpdate("a", 3, codec, encoded.size_bytes, encoded.digest, report)
    return Upload(announced, Model.empty(model.signature), path, lock), messages


def test_an_upload_that_finished_before_its_stream_was_cut_stays_finished(tmp_path: Path) -> None:
    arriving, messages = new_upload(tmp_path / "u")
    arriving.finish(arriving.reopen(), messages)
    token = arriving.reopen()
    assert arriving.offset_bytes == arriving.announced.size_bytes
    arriving.finish(token)


def test_a_given_up_upload_takes_nothing_and_never_finishes(tmp_path: Path) -> None:
    arriving, messages = new_upload(tmp_path / "u")
    token = arriving.reopen()
    arriving.take(token, messages)
    arriving.discard()
    with pytest.raises(WrongState):
        arriving.take(token, messages)
    with pytest.raises(WrongState, match="given up"):
        arriving.finish(token)
    assert not (tmp_path / "u").exists()


def test_a_given_up_upload_does_not_touch_the_file_of_the_next(tmp_path: Path) -> None:
    given_up, messages = new_upload(tmp_path / "u")
    given_up.discard()
    following, _ = new_upload(tmp_path / "u")
    token = following.reopen()
    with pytest.raises(WrongState, match="given up"):
        given_up.reopen()  # It waited for a thread meanwhile.
    given_up.discard()
    following.finish(token, messages)
    assert (tmp_path / "u").exists()


def test_an_upload_ignores_what_an_older_upload_left_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "u").write_bytes(b"what an older upload left" * 1000)
    arriving, messages = new_upload(tmp_path / "u")
    token = arriving.reopen()
    assert arriving.offset_bytes == 0
    arriving.take(token, messages)
    again, _ = new_upload(tmp_path / "u")
    again.reopen()
    assert again.offset_bytes == arriving.announced.size_bytes


def messages_of(model: Model) -> list[bytes]:
    """Return the messages of an update."""
    messages = list[bytes]()
    encode(model_pieces(model), lambda head, data: messages.append(b"".join((head, data))))
    return messages


class Writes(io.BytesIO):
    """A file that records each write: a process can be killed after any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        """Record and perform a write."""
        self.done.append((self.tell(), bytes(data)))
        return super().write(data)


def test_a_server_killed_within_a_record_never_mistakes_an_older_update_for_the_new(
    tmp_path: Path,
) -> None:
    """The file held another update of the same size, whose records are all valid."""
    models = [Model.of({"w": np.full(600_000, value, np.float32)}) for value in (1.0, 2.0)]
    streams, signature = [messages_of(model) for model in models], models[1].signature
    encoded = encode(model_pieces(models[1]), lambda head, data: None)
    announced = replace(
        new_upload(None)[0].announced, size_bytes=encoded.size_bytes, digest=encoded.digest
    )
    old, new = Writes(), Writes()
    for file, tag, messages in (
        (old, b"old tag.", streams[0]),
        (new, tag_of(3, "a", encoded.digest), streams[1]),
    ):
        for message in messages:
            write_record(file, tag, message)
    for count in range(len(new.done) + 1):
        (tmp_path / "u").write_bytes(old.getvalue())
        with open(tmp_path / "u", "r+b") as disk:
            for offset, data in new.done[:count]:
                disk.seek(offset)
                disk.write(data)
        again = Upload(announced, Model.empty(signature), tmp_path / "u")
        token = again.reopen()
        again.finish(
            token,
            streams[1][again.offset_bytes // (1 << 20) + (again.offset_bytes % (1 << 20) > 0) :],
        )
        assert (again.row.parameters == 2.0).all()


def test_an_upload_that_differs_from_its_announcement_is_spoiled_but_not_a_short_one(
    tmp_path: Path,
) -> None:
    arriving, messages = new_upload(tmp_path / "u")
    with pytest.raises(OutOfOrder, match="ended after 0 of 40"):
        arriving.finish(arriving.reopen())
    assert not arriving.spoiled
    arriving.announced = replace(arriving.announced, digest=bytes(32))
    with pytest.raises(Corrupted, match="announced was 0000"):
        arriving.finish(arriving.reopen(), messages)
    assert arriving.spoiled


def test_a_stream_with_a_void_token_can_neither_write_nor_finish(tmp_path: Path) -> None:
    arriving, messages = new_upload(tmp_path / "u")
    token = arriving.reopen()
    arriving.take(token, messages)
    arriving.close()
    for rest in (messages, []):
        with pytest.raises(WrongState, match="opened again elsewhere"):
            arriving.finish(token, rest)
    arriving.finish(arriving.reopen())


def test_an_upload_begins_only_after_the_previous_file_is_removed(
    tmp_path: Path,
) -> None:
    later = list[Work]()
    lock = UploadLock(later.append)
    before, messages = new_upload(tmp_path / "u", lock)
    before.take(before.reopen(), messages)
    before.discard()
    following, _ = new_upload(tmp_path / "u", lock)
    token = following.reopen()
    assert following.offset_bytes == 0
    following.finish(token, messages)
    for work in later:
        work()
    assert (tmp_path / "u").stat().st_size > 0


def test_an_upload_whose_round_is_over_continues_in_memory(tmp_path: Path) -> None:
    arriving, messages = new_upload(tmp_path / "u")
    token = arriving.reopen()
    arriving.go_on_in_memory()
    assert arriving.path is None
    assert not (tmp_path / "u").exists()
    arriving.finish(token, messages)
    assert (arriving.row.parameters == 1.0).all()
    assert not (tmp_path / "u").exists()


def test_the_event_loop_never_waits_for_a_disk_a_codec_or_another_thread(
    tmp_path: Path,
) -> None:
    lock = UploadLock()
    plain, _ = new_upload(None, lock)
    assert plain.takes_at_once
    with lock.taken():  # A replaced stream, in its own thread.
        assert not plain.takes_at_once
    assert not new_upload(tmp_path / "u")[0].takes_at_once
    assert not new_upload(None, codec="int8")[0].takes_at_once
