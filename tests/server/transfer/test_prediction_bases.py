"""Prediction bases on the server's disk: valid from commit to commit, and bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.errors import BadRequest, StateDirError, WrongState
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Vector
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.upload import AnnouncedUpdate, check_announced


def row(value: float) -> Vector:
    """Return a decoded update of equal values."""
    return np.full(10, value, np.float32)


def digest(number: int) -> bytes:
    """Return the digest of the update of this round."""
    return bytes([number] * 32)


def commit(bases: PredictionBases, round_number: int, *clients: str) -> None:
    """Commit a round with these clients."""
    bases.write(
        round_number, {client: (digest(round_number), row(round_number)) for client in clients}
    )
    bases.settle()


def test_a_base_is_valid_after_its_round_is_committed_and_not_before(tmp_path: Path) -> None:
    bases = PredictionBases(tmp_path, 0)
    commit(bases, 0, "ann")
    bases.write(1, {"ann": (digest(1), row(1))})
    assert bases.digest_of("ann") == digest(0)
    np.testing.assert_array_equal(bases.read("ann", digest(0)), row(0))
    bases.settle()
    np.testing.assert_array_equal(bases.read("ann", digest(1)), row(1))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_after_a_crash_at_the_commit_the_base_of_the_last_committed_round_counts(
    tmp_path: Path, committed: bool
) -> None:
    bases = PredictionBases(tmp_path, 0)
    commit(bases, 0, "ann", "b@b")
    # The server is killed after this, before or after the transaction.
    bases.write(1, {"ann": (digest(1), row(1))})
    (tmp_path / "torn.part").write_bytes(b"half")
    again = PredictionBases(tmp_path, 1 + committed)
    assert again.digest_of("ann") == digest(int(committed))
    assert again.digest_of("b@b") == digest(0)
    assert len(list(tmp_path.iterdir())) == 4, "opening changes nothing"
    again.clear_away()
    assert len(list(tmp_path.iterdir())) == 2
    np.testing.assert_array_equal(again.read("ann", digest(int(committed))), row(int(committed)))


def test_an_unknown_base_is_refused_and_the_available_one_is_named(tmp_path: Path) -> None:
    bases = PredictionBases(tmp_path, 0)
    with pytest.raises(WrongState, match="it has none"):
        bases.read("ann", digest(1))
    commit(bases, 0, "ann")
    with pytest.raises(
        WrongState, match=r"server does not have \(it has 0000.*…\)\. Request a new task"
    ):
        bases.read("ann", digest(1))


def test_a_damaged_base_is_detected_and_can_be_deleted(tmp_path: Path) -> None:
    bases = PredictionBases(tmp_path, 0)
    commit(bases, 0, "ann")
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(StateDirError, match="damaged"):
        bases.read("ann", digest(0))
    bases.lose("ann", digest(1))  # this base has been replaced already
    assert bases.digest_of("ann") == digest(0)
    bases.lose("ann", digest(0))
    bases.lose("ann", digest(0))
    assert bases.digest_of("ann") == b""
    assert not file.exists()


def test_without_prediction_only_bases_that_updates_need_are_kept(tmp_path: Path) -> None:
    bases = PredictionBases(tmp_path, 0)
    commit(bases, 0, "ann")
    commit(bases, 1, "bob")
    later = PredictionBases(tmp_path, 2)
    later.clear_away(needed={digest(1)})
    assert [later.digest_of(client) for client in ("ann", "bob")] == [b"", digest(1)]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_oldest_bases_beyond_the_limit_are_deleted(tmp_path: Path) -> None:
    first = PredictionBases(tmp_path, 0)
    commit(first, 0, "ann")
    (file,) = tmp_path.iterdir()
    bases = PredictionBases(tmp_path, 1, keep_bytes=2 * file.stat().st_size)
    commit(bases, 1, "bob")
    commit(bases, 2, "cid")
    assert [bases.digest_of(client) for client in ("ann", "bob", "cid")] == [
        b"",
        digest(1),
        digest(2),
    ]
    assert len(list(tmp_path.iterdir())) == 2


def test_only_topk_and_topsign_updates_may_be_delta_coded() -> None:
    report = TrainReport(samples=1, loss_before=1.0, loss_after=1.0, steps=1, learning_rate=0.1)
    for codec in ("topk:0.1", "topsign:0.1"):
        check_announced(
            AnnouncedUpdate("ann", 0, codec, 10, bytes(32), report, base=digest(1)), 100
        )
    with pytest.raises(BadRequest, match="only topk and topsign"):
        check_announced(
            AnnouncedUpdate("ann", 0, "int8", 10, bytes(32), report, base=digest(1)), 100
        )
