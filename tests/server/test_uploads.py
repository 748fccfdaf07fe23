"""One upload on its way in: finished once, given up for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.errors import Corrupted, OutOfOrder, WrongState
from fairfleet.common.reports import TrainReport
from fairfleet.common.stream import encode, model_pieces
from fairfleet.common.tensors import Model
from fairfleet.server.turns import Turn, Work
from fairfleet.server.uploads import Announced, Upload


def upload(path: Path | None, turn: Turn | None = None, codec: str = "raw32") -> tuple[Upload, list[bytes]]:
    model, messages = Model.of({"w": np.ones(10, np.float32)}), list[bytes]()
    encoded = encode(model_pieces(model), lambda head, data: messages.append(b"".join((head, data))))
    report = TrainReport(samples=1, loss_before=1.0, loss_after=1.0, steps=1, learning_rate=0.1)
    announced = Announced("a", 3, codec, encoded.size_bytes, encoded.digest, report)
    return Upload(announced, Model.empty(model.signature), path, turn), messages


def test_an_upload_finished_before_its_stream_was_cut_is_finished_still(tmp_path: Path) -> None:
    one, messages = upload(tmp_path / "u")
    one.finish(one.reopen(), messages)
    token = one.reopen()
    assert one.offset_bytes == one.announced.size_bytes
    one.finish(token)


def test_an_upload_that_was_given_up_takes_nothing_and_is_never_finished(tmp_path: Path) -> None:
    one, messages = upload(tmp_path / "u")
    token = one.reopen()
    one.take(token, messages)
    one.discard()
    with pytest.raises(WrongState):
        one.take(token, messages)
    with pytest.raises(WrongState, match="given up"):
        one.finish(token)
    assert not (tmp_path / "u").exists()


def test_an_upload_that_was_given_up_leaves_its_files_name_to_the_next(tmp_path: Path) -> None:
    given_up, messages = upload(tmp_path / "u")
    given_up.discard()
    following, _ = upload(tmp_path / "u")
    token = following.reopen()
    with pytest.raises(WrongState, match="given up"):
        given_up.reopen()  # it had waited for a thread meanwhile
    given_up.discard()
    following.finish(token, messages)
    assert (tmp_path / "u").exists()


def test_a_used_file_holds_only_what_was_written_for_this_upload(tmp_path: Path) -> None:
    (tmp_path / "u").write_bytes(b"what an older upload left" * 1000)
    one, messages = upload(tmp_path / "u")
    token = one.reopen()
    assert one.offset_bytes == 0
    one.take(token, messages)
    again, _ = upload(tmp_path / "u")
    again.reopen()
    assert again.offset_bytes == one.announced.size_bytes


def test_an_upload_that_is_not_what_was_announced_is_spoiled_and_one_cut_short_is_not(tmp_path: Path) -> None:
    one, messages = upload(tmp_path / "u")
    with pytest.raises(OutOfOrder, match="ended after 0 of 40"):
        one.finish(one.reopen())
    assert not one.spoiled
    one.announced = replace(one.announced, digest=bytes(32))
    with pytest.raises(Corrupted, match="announced was 0000"):
        one.finish(one.reopen(), messages)
    assert one.spoiled


def test_a_stream_whose_token_was_taken_away_can_neither_write_nor_finish(tmp_path: Path) -> None:
    one, messages = upload(tmp_path / "u")
    token = one.reopen()
    one.take(token, messages)
    one.close()
    for rest in (messages, []):
        with pytest.raises(WrongState, match="opened again elsewhere"):
            one.finish(token, rest)
    one.finish(one.reopen())


def test_an_upload_of_the_same_name_begins_only_when_the_one_before_has_cleared_its_file_away(tmp_path: Path) -> None:
    later = list[Work]()
    turn = Turn(later.append)
    before, messages = upload(tmp_path / "u", turn)
    before.take(before.reopen(), messages)
    before.discard()
    following, _ = upload(tmp_path / "u", turn)
    token = following.reopen()
    assert following.offset_bytes == 0
    following.finish(token, messages)
    for work in later:
        work()
    assert (tmp_path / "u").stat().st_size > 0


def test_an_upload_whose_round_went_on_is_kept_in_memory_from_then_on(tmp_path: Path) -> None:
    one, messages = upload(tmp_path / "u")
    token = one.reopen()
    one.go_on_in_memory()
    assert one.path is None
    assert not (tmp_path / "u").exists()
    one.finish(token, messages)
    assert (one.row.parameters == 1.0).all()
    assert not (tmp_path / "u").exists()


def test_nobody_on_the_event_loop_waits_for_a_disk_a_codec_or_another_thread(tmp_path: Path) -> None:
    turn = Turn()
    plain, _ = upload(None, turn)
    assert plain.takes_at_once
    with turn.taken():  # by a stream that was replaced, in a thread of its own
        assert not plain.takes_at_once
    assert not upload(tmp_path / "u")[0].takes_at_once
    assert not upload(None, codec="int8")[0].takes_at_once
