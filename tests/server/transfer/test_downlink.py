"""Clients that apply the changes have the published model bit for bit, and nothing is lost."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import pytest

from fairfleet.client.task import Job
from fairfleet.common.chunk_stream import Decoder, digest_of
from fairfleet.common.codecs import codec_named, round_to, steady_codec
from fairfleet.common.tensors import Model, Section, Vector, add_change
from fairfleet.common.training_plan import Plan
from fairfleet.lab import digits
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.settings import CompressionSettings
from fairfleet.server.transfer.downlink import Downlink
from fairfleet.server.transfer.published_model import PublishedModel

SIZE = 3000


def model(parameters: Vector, mean: float = 0.0, count: int = 0) -> Model:
    """Return a model with these parameters, a buffer and a counter."""
    return Model.of({"w": parameters}, {"mean": np.full(2, mean, np.float32), "n": np.array(count)})


def follow(before: Model, change: PublishedModel, codec: str) -> Model:
    """Apply a change like a client, as FORMAT.md specifies."""
    into = Model.empty(before.signature)
    decoder = Decoder(into, codec_named(codec))
    for message in change.messages_from(0):
        decoder.take(message)
    decoder.finish(change.digest)
    return Model(before.signature, before.parameters + into.parameters, into.buffers, into.counters)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4", "sign", "topk:0.1", "int8+zstd"])
def test_a_client_that_follows_the_changes_has_the_published_bits(codec: str) -> None:
    draw, downlink = np.random.default_rng(0), Downlink(codec, keep=3)
    published = followed = model(draw.standard_normal(SIZE, dtype=np.float32))
    master, residual = published.parameters.astype(np.float64), np.zeros(SIZE)
    for version in range(1, 30):
        step = draw.standard_normal(SIZE, dtype=np.float32) * np.float32(0.01)
        target = model(published.parameters - step, version, version)
        master -= step
        change = downlink.publish(published, target, version)
        downlink.adopt(change)
        published = target
        assert change.publication is not None
        assert change.residual is not None
        followed = follow(followed, change.publication, codec)
        residual = change.residual.astype(np.float64)
        assert digest_of(followed) == digest_of(published)
        np.testing.assert_allclose(published.parameters + residual, master, atol=1e-4)
    assert np.abs(residual).max() < 0.5, "the residual must not grow"
    assert [change.version for change in downlink.changes] == [27, 28, 29]


def test_a_lossless_downlink_publishes_the_exact_model_without_changes() -> None:
    downlink, before = Downlink("raw32"), model(np.zeros(SIZE, np.float32))
    target = model(np.ones(SIZE, np.float32))
    downlink.adopt(downlink.publish(before, target, 1))
    np.testing.assert_array_equal(target.parameters, np.float32(1))
    assert downlink.changes == ()


def test_the_residual_is_added_when_the_downlink_becomes_lossless() -> None:
    downlink = Downlink("raw32", residual=np.full(SIZE, 0.25, np.float32))
    target = model(np.ones(SIZE, np.float32))
    downlink.adopt(downlink.publish(model(np.zeros(SIZE, np.float32)), target, 1))
    np.testing.assert_array_equal(target.parameters, np.float32(1.25))
    again = model(np.ones(SIZE, np.float32))
    downlink.adopt(downlink.publish(target, again, 2))
    np.testing.assert_array_equal(again.parameters, np.float32(1))


def newcomers_model(publication: PublishedModel) -> Model:
    """Decode the full model in the compact codec, like a new client."""
    compact = publication.compact
    assert compact is not None
    into = model(np.zeros(SIZE, np.float32))
    decoder = Decoder(into, codec_named(compact.codec))
    for message in compact.messages_from(0):
        decoder.take(message)
    decoder.finish(compact.digest)
    return into


@pytest.mark.parametrize("model_codec", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("codec", ["raw32", "int8", "topk:0.1"])
def test_newcomers_and_followers_have_the_same_bits_and_the_master_copy_is_not_lost(
    codec: str, model_codec: str
) -> None:
    draw, downlink = np.random.default_rng(0), Downlink(codec, model=model_codec)
    published = model(draw.standard_normal(SIZE, dtype=np.float32))
    master = published.parameters.astype(np.float64)
    residual = downlink.rounded(published)
    downlink, followed = Downlink(codec, residual=residual, model=model_codec), published
    for version in range(1, 60):
        step = draw.standard_normal(SIZE, dtype=np.float32) * np.float32(0.003)
        target = model(published.parameters - step, version, version)
        master -= step
        change = downlink.publish(published, target, version)
        downlink.adopt(change)
        published, residual = target, change.residual
        assert residual is not None
        publication = PublishedModel.of(version, published, downlink.steady)
        newcomer = newcomers_model(publication)
        if change.publication is not None:
            followed = follow(followed, change.publication, codec)
            round_to(steady_codec(model_codec), followed.parameters)
            assert digest_of(followed) == publication.digest
        assert digest_of(newcomer) == publication.digest
        np.testing.assert_allclose(
            published.parameters + residual.astype(np.float64), master, atol=1e-4
        )
        if version % 20 == 0:  # A restart loads the residual and the model from the disk.
            downlink = Downlink(codec, residual=residual.copy(), model=model_codec)
    if codec != "topk:0.1":  # Its residual is large by itself.
        assert np.abs(residual).max() < {"fp16": 0.002, "bf16": 0.02, "int8": 0.04}[model_codec]


@pytest.mark.parametrize("halvings", [0, 2, None])
def test_the_rounding_error_of_a_tried_step_joins_the_residual(
    halvings: int | None,
) -> None:
    draw, downlink = np.random.default_rng(0), Downlink("int8", model="int8")
    before = model(np.zeros(SIZE, np.float32))
    step = model(draw.standard_normal(SIZE, dtype=np.float32))
    exact_step = step.parameters.copy()
    change = downlink.propose(step, 1)
    after = model(np.zeros(SIZE, np.float32))
    if halvings is not None:
        add_change(before, step, halvings, out=after)
    rounding_error = downlink.rounded(after) if halvings is not None else None
    shortened = downlink.shorten(change, halvings, rounding_error)
    residual = 0.0 if shortened.residual is None else shortened.residual
    expected = 0.0 if halvings is None else exact_step * 2.0**-halvings
    np.testing.assert_allclose(after.parameters + residual, expected, atol=1e-6)


def test_a_model_that_is_not_rounded_has_no_compact_form() -> None:
    published = PublishedModel.of(
        0, model(np.full(SIZE, 0.1, np.float32)), Downlink(model="fp16").steady
    )
    assert published.compact is None


def accuracy_after(rounds: int, model_codec: str) -> float:
    """Return the accuracy of FedAvg on the demo's clients, which train the published models."""
    tasks = [digits.softmax(name) for name in digits.CLIENTS]
    published, plan = (
        tasks[0].initial_model(),
        Plan(steps=10, batch_size=32, learning_rate=0.1, seed=1),
    )
    downlink = Downlink(model=model_codec)
    for number in range(rounds):
        mean = Model.empty(published.signature)
        mean.parameters[:] = 0
        for name, task in zip(digits.CLIENTS, tasks, strict=True):
            trained = task.train(published.named(), Job(plan.for_client(name, number)))
            parts = [
                trained.arrays[tensor.name]
                for tensor, _ in published.signature.spans(Section.PARAMETERS)
            ]
            mean.parameters[:] += np.concatenate([part.reshape(-1) for part in parts])
        mean.parameters[:] /= len(tasks)
        change = downlink.publish(published, mean, number + 1)
        downlink.adopt(change)
        published = mean
    return float(np.mean([task.evaluate(published.named()).accuracy for task in tasks]))


@pytest.mark.slow
def test_training_with_compact_models_reaches_the_same_accuracy() -> None:
    exact = accuracy_after(40, "raw32")
    assert exact > 0.7
    for model_codec, most in (("fp16", 0.005), ("bf16", 0.01), ("int8", 0.02)):
        assert abs(accuracy_after(40, model_codec) - exact) <= most


def test_a_task_with_the_most_changes_fits_into_grpc_metadata() -> None:
    most = next(
        limit.le
        for limit in CompressionSettings.model_fields["changes"].metadata
        if hasattr(limit, "le")
    )
    change = pb.Change(
        version=2**31,
        digest=bytes(range(32)),
        size_bytes=2**40,
        codec="topk:0.001+zstd",
        halvings=30,
        rounded="bf16",
    )
    plan = pb.Plan(steps=10**6, batch_size=10**4, learning_rate=0.1, seed=2**60)
    model = pb.ModelRef(
        version=2**31, digest=bytes(range(32)), size_bytes=2**40, changes=[change] * most
    )
    task = pb.TrainTask(
        id="train-1000000-10", round=10**6, model=model, plan=plan, codec="topk:0.001+zstd"
    )
    # 512 bytes are left for other metadata.
    assert len(b64encode(pb.NextTaskResponse(train=task).SerializeToString())) < 8192 - 512
