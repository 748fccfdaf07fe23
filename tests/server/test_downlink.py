"""Models as changes: whoever follows them holds the published model bit for bit, and nothing is lost for good."""

from __future__ import annotations

import numpy as np
import pytest

from fairfleet.common.codecs import codec_named
from fairfleet.common.stream import Decoder, digest_of
from fairfleet.common.tensors import Model, Vector
from fairfleet.server.downlink import Downlink
from fairfleet.server.publication import Publication

SIZE = 3000


def model(parameters: Vector, mean: float = 0.0, count: int = 0) -> Model:
    return Model.of({"w": parameters}, {"mean": np.full(2, mean, np.float32), "n": np.array(count)})


def follow(held: Model, change: Publication, codec: str) -> Model:
    """As a client does, and FORMAT.md says."""
    into = Model.empty(held.signature)
    decoder = Decoder(into, codec_named(codec))
    for message in change.messages_from(0):
        decoder.take(message)
    decoder.finish(change.digest)
    return Model(held.signature, held.parameters + into.parameters, into.buffers, into.counters)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4", "sign", "topk:0.1", "int8+zstd"])
def test_a_client_that_follows_the_changes_holds_the_published_bits(codec: str) -> None:
    draw, downlink = np.random.default_rng(0), Downlink(codec, kept=3)
    published = held = model(draw.standard_normal(SIZE, dtype=np.float32))
    master, residual = published.parameters.astype(np.float64), np.zeros(SIZE)
    for version in range(1, 30):
        step = draw.standard_normal(SIZE, dtype=np.float32) * np.float32(0.01)
        wanted = model(published.parameters - step, version, version)
        master -= step
        change = downlink.publish(published, wanted, version)
        downlink.adopt(change)
        published = wanted
        assert change.publication is not None
        assert change.residual is not None
        held, residual = follow(held, change.publication, codec), change.residual.astype(np.float64)
        assert digest_of(held) == digest_of(published)
        np.testing.assert_allclose(published.parameters + residual, master, atol=1e-4)
    assert np.abs(residual).max() < 0.5, "what is not sent must not pile up"
    assert [change.version for change in downlink.changes] == [27, 28, 29]


def test_without_loss_the_model_is_what_was_wanted_and_there_are_no_changes() -> None:
    downlink, before = Downlink("raw32"), model(np.zeros(SIZE, np.float32))
    wanted = model(np.ones(SIZE, np.float32))
    downlink.adopt(downlink.publish(before, wanted, 1))
    np.testing.assert_array_equal(wanted.parameters, np.float32(1))
    assert downlink.changes == ()


def test_what_a_lossy_downlink_held_back_is_made_good_when_it_ends() -> None:
    downlink = Downlink("raw32", residual=np.full(SIZE, 0.25, np.float32))
    wanted = model(np.ones(SIZE, np.float32))
    downlink.adopt(downlink.publish(model(np.zeros(SIZE, np.float32)), wanted, 1))
    np.testing.assert_array_equal(wanted.parameters, np.float32(1.25))
    again = model(np.ones(SIZE, np.float32))
    downlink.adopt(downlink.publish(wanted, again, 2))
    np.testing.assert_array_equal(again.parameters, np.float32(1))
