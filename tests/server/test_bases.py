"""Clients' last updates on the server's disk: held from commit to commit, bounded, and never guessed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.errors import BadRequest, StateDirError, WrongState
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Vector
from fairfleet.server.bases import Bases
from fairfleet.server.uploads import Announced, check_announced


def row(value: float) -> Vector:
    return np.full(10, value, np.float32)


def digest(number: int) -> bytes:
    return bytes([number] * 32)


def commit(bases: Bases, round: int, *clients: str) -> None:
    bases.write(round, {client: (digest(round), row(round)) for client in clients})
    bases.settle()


def test_a_base_is_held_when_its_round_is_committed_and_not_before(tmp_path: Path) -> None:
    bases = Bases(tmp_path, 0)
    commit(bases, 0, "ann")
    bases.write(1, {"ann": (digest(1), row(1))})
    assert bases.digest_of("ann") == digest(0)
    np.testing.assert_array_equal(bases.read("ann", digest(0)), row(0))
    bases.settle()
    np.testing.assert_array_equal(bases.read("ann", digest(1)), row(1))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_a_crash_at_the_commit_leaves_the_base_of_the_last_committed_round(tmp_path: Path, committed: bool) -> None:
    bases = Bases(tmp_path, 0)
    commit(bases, 0, "ann", "b@b")
    bases.write(1, {"ann": (digest(1), row(1))})  # and then the server dies, before or after the transaction
    (tmp_path / "torn.part").write_bytes(b"half")
    again = Bases(tmp_path, 1 + committed)
    assert again.digest_of("ann") == digest(int(committed))
    assert again.digest_of("b@b") == digest(0)
    assert len(list(tmp_path.iterdir())) == 4, "opening changes nothing"
    again.clear_away()
    assert len(list(tmp_path.iterdir())) == 2
    np.testing.assert_array_equal(again.read("ann", digest(int(committed))), row(int(committed)))


def test_a_base_that_is_not_held_is_refused_with_what_is(tmp_path: Path) -> None:
    bases = Bases(tmp_path, 0)
    with pytest.raises(WrongState, match="nothing of it is"):
        bases.read("ann", digest(1))
    commit(bases, 0, "ann")
    with pytest.raises(WrongState, match=r"which is not held here \(0000.*… is\)\. Ask for a new task"):
        bases.read("ann", digest(1))


def test_a_damaged_base_is_noticed_and_can_be_given_up(tmp_path: Path) -> None:
    bases = Bases(tmp_path, 0)
    commit(bases, 0, "ann")
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(StateDirError, match="damaged"):
        bases.read("ann", digest(0))
    bases.lose("ann", digest(1))  # that one is gone already: another took its place meanwhile
    assert bases.digest_of("ann") == digest(0)
    bases.lose("ann", digest(0))
    bases.lose("ann", digest(0))
    assert bases.digest_of("ann") == b""
    assert not file.exists()


def test_where_nothing_is_predicted_any_more_only_what_updates_need_is_kept(tmp_path: Path) -> None:
    bases = Bases(tmp_path, 0)
    commit(bases, 0, "ann")
    commit(bases, 1, "bob")
    later = Bases(tmp_path, 2)
    later.clear_away(needed={digest(1)})
    assert [later.digest_of(client) for client in ("ann", "bob")] == [b"", digest(1)]
    assert len(list(tmp_path.iterdir())) == 1


def test_beyond_the_limit_the_oldest_go(tmp_path: Path) -> None:
    one = Bases(tmp_path, 0)
    commit(one, 0, "ann")
    (file,) = tmp_path.iterdir()
    bases = Bases(tmp_path, 1, keep_bytes=2 * file.stat().st_size)
    commit(bases, 1, "bob")
    commit(bases, 2, "cid")
    assert [bases.digest_of(client) for client in ("ann", "bob", "cid")] == [b"", digest(1), digest(2)]
    assert len(list(tmp_path.iterdir())) == 2


def test_only_topk_and_topsign_may_be_told_by_a_base() -> None:
    report = TrainReport(samples=1, loss_before=1.0, loss_after=1.0, steps=1, learning_rate=0.1)
    for codec in ("topk:0.1", "topsign:0.1"):
        check_announced(Announced("ann", 0, codec, 10, bytes(32), report, base=digest(1)), 100)
    with pytest.raises(BadRequest, match="only those in topk"):
        check_announced(Announced("ann", 0, "int8", 10, bytes(32), report, base=digest(1)), 100)
