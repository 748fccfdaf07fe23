"""Models as changes: whoever follows them holds the published model bit for bit, and nothing is lost for good."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import pytest

from fairfleet.client.task import Job
from fairfleet.common.codecs import codec_named, round_to, steady_codec
from fairfleet.common.plan import Plan
from fairfleet.common.stream import Decoder, digest_of
from fairfleet.common.tensors import Model, Section, Vector, add_change
from fairfleet.lab import digits
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.downlink import Downlink
from fairfleet.server.publication import Publication
from fairfleet.server.settings import Compression

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


def whole(publication: Publication) -> Model:
    """As a newcomer gets it: in few bytes."""
    compact = publication.compact
    assert compact is not None
    into = model(np.zeros(SIZE, np.float32))
    decoder = Decoder(into, codec_named(compact.codec))
    for message in compact.messages_from(0):
        decoder.take(message)
    decoder.finish(compact.digest)
    return into


@pytest.mark.parametrize("kept_in", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("codec", ["raw32", "int8", "topk:0.1"])
def test_newcomers_and_followers_hold_the_same_bits_and_the_master_is_not_lost(codec: str, kept_in: str) -> None:
    draw, downlink = np.random.default_rng(0), Downlink(codec, model=kept_in)
    published = model(draw.standard_normal(SIZE, dtype=np.float32))
    master = published.parameters.astype(np.float64)
    residual = downlink.rounded(published)
    downlink, held = Downlink(codec, residual=residual, model=kept_in), published
    for version in range(1, 60):
        step = draw.standard_normal(SIZE, dtype=np.float32) * np.float32(0.003)
        wanted = model(published.parameters - step, version, version)
        master -= step
        change = downlink.publish(published, wanted, version)
        downlink.adopt(change)
        published, residual = wanted, change.residual
        assert residual is not None
        publication = Publication.of(version, published, downlink.steady)
        newcomer = whole(publication)
        if change.publication is not None:
            held = follow(held, change.publication, codec)
            round_to(steady_codec(kept_in), held.parameters)
            assert digest_of(held) == publication.digest
        assert digest_of(newcomer) == publication.digest
        np.testing.assert_allclose(published.parameters + residual.astype(np.float64), master, atol=1e-4)
        if version % 20 == 0:  # a restart: what is held back is on the disk, all else is made from the model
            downlink = Downlink(codec, residual=residual.copy(), model=kept_in)
    if codec != "topk:0.1":  # which holds back much by itself
        assert np.abs(residual).max() < {"fp16": 0.002, "bf16": 0.02, "int8": 0.04}[kept_in]


@pytest.mark.parametrize("halvings", [0, 2, None])
def test_of_a_step_that_was_tried_what_rounding_takes_is_held_back_as_well(halvings: int | None) -> None:
    draw, downlink = np.random.default_rng(0), Downlink("int8", model="int8")
    before = model(np.zeros(SIZE, np.float32))
    step = model(draw.standard_normal(SIZE, dtype=np.float32))
    wanted = step.parameters.copy()
    change = downlink.propose(step, 1)
    after = model(np.zeros(SIZE, np.float32))
    if halvings is not None:
        add_change(before, step, halvings, out=after)
    taken = downlink.rounded(after) if halvings is not None else None
    shortened = downlink.shorten(change, halvings, taken)
    held_back = 0.0 if shortened.residual is None else shortened.residual
    expected = 0.0 if halvings is None else wanted * 2.0**-halvings
    np.testing.assert_allclose(after.parameters + held_back, expected, atol=1e-6)


def test_a_model_from_before_the_setting_is_sent_as_it_is() -> None:
    found = Publication.of(0, model(np.full(SIZE, 0.1, np.float32)), Downlink(model="fp16").steady)
    assert found.compact is None


def accuracy_after(rounds: int, kept_in: str) -> float:
    """FedAvg of the demo's clients, who train what is published."""
    tasks = [digits.softmax(name) for name in digits.CLIENTS]
    published, plan = tasks[0].initial_model(), Plan(steps=10, batch_size=32, learning_rate=0.1, seed=1)
    downlink = Downlink(model=kept_in)
    for number in range(rounds):
        wanted = Model.empty(published.signature)
        wanted.parameters[:] = 0
        for name, task in zip(digits.CLIENTS, tasks, strict=True):
            trained = task.train(published.named(), Job(plan.for_client(name, number)))
            parts = [trained.arrays[tensor.name] for tensor, _ in published.signature.spans(Section.PARAMETERS)]
            wanted.parameters[:] += np.concatenate([part.reshape(-1) for part in parts])
        wanted.parameters[:] /= len(tasks)
        change = downlink.publish(published, wanted, number + 1)
        downlink.adopt(change)
        published = wanted
    return float(np.mean([task.evaluate(published.named()).accuracy for task in tasks]))


def test_training_with_models_in_few_bytes_ends_as_without() -> None:
    exact = accuracy_after(40, "raw32")
    assert exact > 0.7
    for kept_in, most in (("fp16", 0.005), ("bf16", 0.01), ("int8", 0.02)):
        assert abs(accuracy_after(40, kept_in) - exact) <= most


def test_a_task_fits_into_the_metadata_that_grpc_takes_however_many_changes_it_names() -> None:
    most = next(limit.le for limit in Compression.model_fields["changes"].metadata if hasattr(limit, "le"))
    change = pb.Change(
        version=2**31, digest=bytes(range(32)), size_bytes=2**40, codec="topk:0.001+zstd", halvings=30, rounded="bf16"
    )
    plan = pb.Plan(steps=10**6, batch_size=10**4, learning_rate=0.1, seed=2**60)
    model = pb.ModelRef(version=2**31, digest=bytes(range(32)), size_bytes=2**40, changes=[change] * most)
    task = pb.TrainTask(id="train-1000000-10", round=10**6, model=model, plan=plan, codec="topk:0.001+zstd")
    assert len(b64encode(pb.NextTaskResponse(train=task).SerializeToString())) < 8192 - 512  # other metadata go along
