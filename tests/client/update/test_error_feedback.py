"""Error feedback on the client's disk: what a codec loses is sent later, exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.client.update.error_feedback import StoredResidual
from fairfleet.client.update.spool import Spool, SpooledUpdate
from fairfleet.common.chunk_stream import Decoder
from fairfleet.common.codecs import codec_named
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model, Vector

REPORT = TrainReport(samples=3, loss_before=1.0, loss_after=0.5, steps=2, learning_rate=0.1)
SIZE = 700
LIKE = Model.of({"w": np.zeros(SIZE, np.float32)})


class Client:
    """A client's folder only: every step could be by another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def spool(self) -> Spool:
        return Spool(self.folder)

    def write(
        self,
        update: Vector,
        round_number: int,
        codec: str = "topk:0.01",
        federation: str = "f",
        error_feedback: bool = True,
    ) -> SpooledUpdate:
        received = Model.of({"w": update})
        return self.spool.write(
            received,
            LIKE,
            REPORT,
            federation=federation,
            round_number=round_number,
            model_digest="aa",
            codec=codec,
            seed=round_number,
            error_feedback=error_feedback,
        )

    def arrives(self, spooled: SpooledUpdate) -> Vector:
        row = Model.empty(LIKE.signature)
        decoder = Decoder(row, codec_named(spooled.codec))
        for message in self.spool.messages_from(0):
            decoder.take(message)
        decoder.finish(bytes.fromhex(spooled.digest))
        return row.parameters

    def residual(self, round_number: int = 10**6, federation: str = "f") -> Vector:
        values = StoredResidual(self.folder).of(federation, LIKE.signature, round_number)
        return np.zeros(SIZE, np.float32) if values is None else np.array(values)


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


def update(round_number: int) -> Vector:
    return np.random.default_rng(round_number).standard_normal(SIZE, dtype=np.float32)


Fate = Callable[[Client, SpooledUpdate], bool]  # whether it counted


def counted(client: Client, spooled: SpooledUpdate) -> bool:
    client.spool.settle(spooled, counted=True)
    return True


def ignored(client: Client, spooled: SpooledUpdate) -> bool:
    client.spool.settle(spooled, counted=False)
    return False


def task_failed(client: Client, spooled: SpooledUpdate) -> bool:
    client.spool.clear()
    return False


def killed_before_the_receipt_of_a_counted_update(client: Client, spooled: SpooledUpdate) -> bool:
    unsettled = client.spool.unsettled("f")  # by the next process, which queries the server
    assert unsettled == spooled
    client.spool.settle(unsettled, counted=True)
    return True


def killed_between_adopting_and_clearing(client: Client, spooled: SpooledUpdate) -> bool:
    StoredResidual(client.folder).adopt(bytes.fromhex(spooled.digest))
    assert client.spool.unsettled("f") is None
    return True


def settled_twice(client: Client, spooled: SpooledUpdate) -> bool:
    client.spool.settle(spooled, counted=True)
    client.spool.settle(spooled, counted=True)
    return True


def counted_but_not_yet_for_good(client: Client, spooled: SpooledUpdate) -> bool:
    client.spool.settle(spooled, counted=True, for_good=False)
    # A server that lost the update is sent the same one again.
    assert client.spool.find("f", spooled.round, "aa") == spooled
    client.spool.settle(spooled, counted=True)
    return True


def counted_and_lost_with_the_server(client: Client, spooled: SpooledUpdate) -> bool:
    client.spool.settle(spooled, counted=True, for_good=False)
    client.spool.settle(spooled, counted=False)
    return False


def never_settled(client: Client, spooled: SpooledUpdate) -> bool:
    return False


FATES: list[Fate] = [
    counted,
    ignored,
    task_failed,
    killed_before_the_receipt_of_a_counted_update,
    killed_between_adopting_and_clearing,
    settled_twice,
    counted_but_not_yet_for_good,
    counted_and_lost_with_the_server,
    never_settled,
]


@settings(max_examples=40, deadline=None)
@given(
    fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=12),
    codec=st.sampled_from(["topk:0.01", "int4"]),
)
def test_decoded_updates_plus_the_residual_equal_the_updates_that_counted(
    fates: list[Fate], codec: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    client = Client(tmp_path_factory.mktemp("client"))
    arrived, truth = np.zeros(SIZE), np.zeros(SIZE)
    for round_number, fate in enumerate(fates, start=1):
        spooled = client.write(update(round_number), round_number, codec)
        decoded = client.arrives(spooled)
        if fate(client, spooled):
            arrived, truth = arrived + decoded, truth + update(round_number)
        np.testing.assert_allclose(arrived + client.residual(), truth, atol=1e-4)


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
def test_the_residual_changes_only_if_the_update_counted(client: Client, fate: Fate) -> None:
    counted(client, client.write(update(1), 1))
    before = client.residual()
    assert before.any()
    changed = fate(client, client.write(update(2), 2))
    assert (not np.array_equal(client.residual(), before)) == changed


def test_a_codec_without_loss_sends_the_whole_residual_and_leaves_none(client: Client) -> None:
    counted(client, client.write(update(1), 1))
    residual = client.residual()
    spooled = client.write(update(2), 2, "raw32")
    np.testing.assert_array_equal(client.arrives(spooled), update(2) + residual)
    counted(client, spooled)
    assert not client.residual().any()
    np.testing.assert_array_equal(client.arrives(client.write(update(3), 3, "raw32")), update(3))


def test_a_residual_is_not_used_for_another_federation_or_one_that_started_again(
    client: Client,
) -> None:
    counted(client, client.write(update(5), 5))
    assert client.residual(round_number=6).any()
    assert not client.residual(round_number=6, federation="another").any()
    assert not client.residual(round_number=5).any()
    another_model = Model.of({"v": np.zeros(SIZE, np.float32)}).signature
    assert StoredResidual(client.folder).of("f", another_model, 6) is None


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-1], lambda b: b"\x01" + b[1:], lambda b: b[:-20] + bytes(20), lambda b: b""],
)
def test_a_damaged_residual_is_ignored_and_the_next_update_is_sent_without_it(
    client: Client, damage: Callable[[bytes], bytes]
) -> None:
    counted(client, client.write(update(1), 1))
    file = client.folder / "residual"
    file.write_bytes(damage(file.read_bytes()))
    assert not client.residual().any()
    np.testing.assert_array_equal(client.arrives(client.write(update(2), 2, "raw32")), update(2))


def test_a_client_killed_while_encoding_keeps_its_residual(client: Client) -> None:
    counted(client, client.write(update(1), 1))
    before = client.residual()
    broken = update(2)
    broken[SIZE - 1] = np.nan  # ends the encoding as abruptly as a signal would
    with pytest.raises(Exception, match="not a finite number"):
        client.write(broken, 2)
    np.testing.assert_array_equal(client.residual(), before)
    assert client.spool.unsettled("f") is None


def test_without_error_feedback_no_residual_is_kept(tmp_path: Path) -> None:
    received = Model.of({"w": update(1)})
    spool = Spool(tmp_path)
    spooled = spool.write(
        received, LIKE, REPORT, federation="f", round_number=1, model_digest="aa", codec="topk:0.01"
    )
    assert spool.unsettled("f") is None
    spool.settle(spooled, counted=True)
    assert not Client(tmp_path).residual().any()


def test_the_loss_of_an_update_that_did_not_count_is_not_adopted_with_the_next(
    client: Client,
) -> None:
    never_settled(client, client.write(update(1), 1))
    received = Model.of({"w": update(2)})
    plain = client.spool.write(
        received, LIKE, REPORT, federation="f", round_number=2, model_digest="aa", codec="topk:0.01"
    )
    counted(client, plain)
    assert not client.residual().any()


@pytest.mark.parametrize("codec", ["int8", "raw32", "topk:0.01"])
def test_a_task_without_error_feedback_forgets_the_residual_for_good(
    client: Client, codec: str
) -> None:
    client.spool.settle(client.write(update(0), 0), counted=True)
    assert client.residual().any()
    without = client.write(update(1), 1, codec, error_feedback=False)
    if codec == "raw32":
        np.testing.assert_array_equal(client.arrives(without), update(1))
    client.spool.settle(without, counted=True)
    assert not list(client.folder.glob("residual*")), "nothing is kept that nothing will send"
    after = client.write(update(2), 2, "raw32")
    np.testing.assert_array_equal(client.arrives(after), update(2))


def test_without_error_feedback_only_the_update_is_written(client: Client) -> None:
    client.spool.settle(client.write(update(0), 0, "int8", error_feedback=False), counted=True)
    assert {file.name for file in client.folder.iterdir()} == {"update.chunks"}
