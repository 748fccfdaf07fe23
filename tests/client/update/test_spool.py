"""The spooled update is found again for its own round only, and sent as it was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.client.update.spool import Spool, SpooledUpdate
from fairfleet.common.chunk_stream import Decoder, split
from fairfleet.common.codecs import RAW32
from fairfleet.common.errors import StateDirError
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model

REPORT = TrainReport(samples=3, loss_before=1.0, loss_after=0.5, steps=2, learning_rate=0.1)


def spooled(spool: Spool, size: int, value: float, round_number: int = 1) -> SpooledUpdate:
    received, trained = (Model.of({"w": np.full(size, v, np.float32)}) for v in (0.0, -value))
    return spool.write(
        received,
        trained,
        REPORT,
        federation="f",
        round_number=round_number,
        model_digest="aa",
        codec="raw32",
    )


def read_back(spool: Spool, update: SpooledUpdate, size: int) -> Model:
    row = Model.of({"w": np.zeros(size, np.float32)})
    decoder = Decoder(row, RAW32)
    for message in spool.messages_from(0):
        decoder.take(message)
    decoder.finish(bytes.fromhex(update.digest))
    return row


def test_an_update_is_found_by_its_round_and_model_only(tmp_path: Path) -> None:
    update = spooled(Spool(tmp_path), 10, 2.0)
    again = Spool(tmp_path)
    assert again.find("f", 1, "aa") == update
    assert again.find("f", 2, "aa") is None
    assert again.find("f", 1, "bb") is None
    assert again.find("another federation", 1, "aa") is None
    again.clear()
    assert again.find("f", 1, "aa") is None


def test_a_shorter_update_replaces_a_longer_one_completely(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spooled(spool, 700_000, 1.0)
    update = spooled(spool, 300_000, 5.0, round_number=2)
    np.testing.assert_array_equal(read_back(spool, update, 300_000).parameters, np.float32(5.0))


def test_a_client_killed_while_writing_has_no_update(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spooled(spool, 10, 1.0)
    spool.clear()  # the first thing that writing the next one does
    assert Spool(tmp_path).find("f", 1, "aa") is None


def test_an_update_with_a_damaged_byte_is_ignored(tmp_path: Path) -> None:
    """A power cut can cause this, because the file is overwritten without fsync."""
    spool = Spool(tmp_path)
    spooled(spool, 1000, 1.0)
    with open(tmp_path / "update.chunks", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert Spool(tmp_path).find_unsent("f") is None


def test_messages_start_at_the_requested_offset(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spooled(spool, 600_000, 1.0)
    offsets = [split(message)[0].offset_bytes for message in spool.messages_from(0)]
    assert offsets == [0, 1 << 20, 2 << 20]
    rest = [split(message)[0].offset_bytes for message in spool.messages_from(1 << 20)]
    assert rest == offsets[1:]
    assert list(spool.messages_from(2_400_000)) == []


def test_a_header_of_another_version_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "update.json").write_text('{"from": "the future"}')
    assert Spool(tmp_path).find("f", 1, "aa") is None


def test_a_folder_that_cannot_be_written_to_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirError, match=r"file.*--state-dir"):
        Spool(tmp_path / "file" / "client-1")
    # Tests may run as root, who may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(StateDirError, match="Permission denied"):
        Spool(tmp_path)
