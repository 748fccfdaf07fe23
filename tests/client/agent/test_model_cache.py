"""A client ends up with the model that was announced, whatever else a server sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairfleet.client.agent.model_cache import ModelCache
from fairfleet.common import wire
from fairfleet.common.chunk_stream import digest_of
from fairfleet.common.codecs import steady_codec
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.transfer.downlink import Downlink
from fairfleet.server.transfer.published_model import PublishedModel

SIZE = 5000


def rounded_model(seed: int, codec: str = "int8", size: int = SIZE) -> Model:
    model = Model.of({"w": np.random.default_rng(seed).standard_normal(size, dtype=np.float32)})
    Downlink(model=codec).rounded(model)
    return model


class LyingConnection:
    """A connection to a server that may send something other than it announced."""

    def __init__(self, model: Model) -> None:
        self.publication = PublishedModel.of(0, model, steady_codec("int8"))
        self.change: PublishedModel | None = None
        self.fetched: list[str] = []
        self.sent_early: list[bytes] = []  # before the next task
        self.held_digests: list[bytes] = []  # of the models that the client says it has
        self.joined = SimpleNamespace(signature=wire.signature_out(model.signature))

    def ref(self, **fields: Any) -> pb.ModelRef:
        model, compact = self.publication, self.publication.compact
        assert compact is not None
        truth: dict[str, Any] = {
            "version": model.version,
            "digest": model.digest,
            "size_bytes": model.size_bytes,
            "compact": pb.Compact(
                codec=compact.codec, digest=compact.digest, size_bytes=compact.size_bytes
            ),
        }
        return pb.ModelRef(**(truth | fields))

    def fetch(
        self,
        version: int,
        offset_bytes: int,
        session: str,
        *,
        change: bool = False,
        compact: bool = False,
    ) -> Iterator[bytes]:
        self.fetched.append("change" if change else "compact" if compact else "whole")
        full = self.publication
        stream = self.change if change else full.compact if compact else full
        assert stream is not None
        return stream.messages_from(offset_bytes)

    def next_task(
        self, held_digest: Callable[[], bytes], receive: Callable[[Iterator[bytes]], None]
    ) -> pb.NextTaskResponse:
        self.held_digests.append(held_digest())
        receive(iter(self.sent_early))
        return pb.NextTaskResponse(train=pb.TrainTask(model=self.ref()))

    def repeat(self, call: Callable[[str], None]) -> None:
        call("session")


def new_cache(connection: LyingConnection, model: Model) -> ModelCache:
    return ModelCache(connection, model.signature)  # type: ignore[arg-type]


def test_a_new_client_fetches_the_compact_form_of_a_model() -> None:
    model = rounded_model(0)
    connection = LyingConnection(model)
    cache = new_cache(connection, model)
    cache.fetch(connection.ref())
    assert connection.fetched == ["compact"]
    assert digest_of(cache.received) == digest_of(model)


def test_a_compact_stream_of_another_model_is_noticed() -> None:
    model = rounded_model(0)
    connection = LyingConnection(model)
    connection.publication = replace(
        connection.publication,
        compact=PublishedModel.of(0, rounded_model(1), steady_codec("int8")).compact,
    )
    cache = new_cache(connection, model)
    cache.fetch(connection.ref())
    assert connection.fetched == ["compact", "whole"]
    assert digest_of(cache.received) == digest_of(model)


@pytest.mark.parametrize("lie", [{"codec": "zip"}, {"codec": "int4"}, {"digest": b"x" * 32}])
def test_a_compact_stream_that_cannot_be_read_is_passed_over(lie: dict[str, Any]) -> None:
    model = rounded_model(0)
    connection = LyingConnection(model)
    ref = connection.ref()
    for name, value in lie.items():
        setattr(ref.compact, name, value)
    cache = new_cache(connection, model)
    cache.fetch(ref)
    assert connection.fetched[-1] == "whole"
    assert digest_of(cache.received) == digest_of(model)


@pytest.mark.parametrize("rounding", ["zip", "int4", ""])
def test_a_change_with_an_unknown_rounding_is_passed_over(rounding: str) -> None:
    first, second, downlink = (
        rounded_model(0, "fp16"),
        rounded_model(1, "fp16"),
        Downlink("int8", model="fp16"),
    )
    connection = LyingConnection(first)
    connection.publication = PublishedModel.of(0, first, steady_codec("fp16"))
    cache = new_cache(connection, first)
    cache.fetch(connection.ref())
    connection.change = downlink.publish(first, second, 1).publication
    assert connection.change is not None
    connection.publication = PublishedModel.of(1, second, steady_codec("fp16"))
    change = pb.Change(
        version=1, digest=connection.change.digest, size_bytes=10, codec="int8", rounded=rounding
    )
    cache.fetch(connection.ref(changes=[change]))
    assert connection.fetched == (
        ["compact", "change", "compact"] if not rounding else ["compact", "compact"]
    )
    assert digest_of(cache.received) == digest_of(second)
    change.rounded, connection.fetched = "fp16", []
    again = new_cache(connection, first)
    connection.publication = PublishedModel.of(0, rounded_model(0, "fp16"), steady_codec("fp16"))
    again.fetch(connection.ref())
    connection.publication = PublishedModel.of(1, second, steady_codec("fp16"))
    again.fetch(connection.ref(changes=[change]))
    assert connection.fetched == ["compact", "change"], (
        "the same change is applied with the right rounding"
    )


def test_a_model_that_arrives_before_its_task_is_not_fetched_again() -> None:
    model = rounded_model(0)
    connection = LyingConnection(model)
    connection.sent_early = list(connection.publication.messages_from(0))
    cache = new_cache(connection, model)
    cache.fetch(cache.next_task().train.model)
    assert connection.fetched == []
    assert digest_of(cache.received) == connection.publication.digest
    cache.next_task()
    assert connection.held_digests == [b"", connection.publication.digest]


@pytest.mark.parametrize("what", ["another", "torn", "damaged", "no chunks"])
def test_data_that_arrive_before_a_task_and_are_not_its_model_are_ignored(what: str) -> None:
    model, another = (rounded_model(seed, size=600_000) for seed in range(2))
    connection = LyingConnection(model)
    chunks = list(PublishedModel.of(0, another if what == "another" else model).messages_from(0))
    connection.sent_early = {
        "torn": chunks[:-1],
        "damaged": [chunks[0][:-1] + b"?", *chunks[1:]],
        "no chunks": [b"?"],
    }.get(what, chunks)
    cache = new_cache(connection, model)
    cache.fetch(connection.ref())
    connection.fetched.clear()
    answer = cache.next_task()
    cache.next_task()
    # The second digest is empty, because the memory was overwritten.
    assert connection.held_digests == [connection.publication.digest, b""]
    cache.fetch(answer.train.model)
    assert connection.fetched
    assert digest_of(cache.received) == connection.publication.digest
