"""The model that a client holds is the one that was announced, whatever a server sends beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairfleet.client.held import HeldModel
from fairfleet.common import wire
from fairfleet.common.codecs import steady_codec
from fairfleet.common.stream import digest_of
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.downlink import Downlink
from fairfleet.server.publication import Publication

SIZE = 5000


def rounded(seed: int, kept_in: str = "int8", size: int = SIZE) -> Model:
    made = Model.of({"w": np.random.default_rng(seed).standard_normal(size, dtype=np.float32)})
    Downlink(model=kept_in).rounded(made)
    return made


class Lying:
    """In place of the link: a server that may send something else than it announced."""

    def __init__(self, model: Model) -> None:
        self.publication = Publication.of(0, model, steady_codec("int8"))
        self.change: Publication | None = None
        self.asked: list[str] = []
        self.unasked: list[bytes] = []  # in front of the next task
        self.told: list[bytes] = []  # which model the client said it holds
        self.joined = SimpleNamespace(signature=wire.signature_out(model.signature))

    def ref(self, **fields: Any) -> pb.ModelRef:
        whole, compact = self.publication, self.publication.compact
        assert compact is not None
        known = pb.Compact(codec=compact.codec, digest=compact.digest, size_bytes=compact.size_bytes)
        told = {"version": whole.version, "digest": whole.digest, "size_bytes": whole.size_bytes, "compact": known}
        return pb.ModelRef(**(told | fields))

    def fetch(
        self, version: int, offset_bytes: int, session: str, *, change: bool = False, compact: bool = False
    ) -> Iterator[bytes]:
        self.asked.append("change" if change else "compact" if compact else "whole")
        found = self.change if change else self.publication.compact if compact else self.publication
        assert found is not None
        return found.messages_from(offset_bytes)

    def next_task(self, held: Callable[[], bytes], receive: Callable[[Iterator[bytes]], None]) -> pb.NextTaskResponse:
        self.told.append(held())
        receive(iter(self.unasked))
        return pb.NextTaskResponse(train=pb.TrainTask(model=self.ref()))

    def repeat(self, call: Callable[[str], None]) -> None:
        call("session")


def held(link: Lying, model: Model) -> HeldModel:
    return HeldModel(link, model.signature)  # type: ignore[arg-type]


def test_a_whole_model_comes_in_few_bytes() -> None:
    model = rounded(0)
    link = Lying(model)
    own = held(link, model)
    own.fetch(link.ref())
    assert link.asked == ["compact"]
    assert digest_of(own.received) == digest_of(model)


def test_a_compact_stream_of_another_model_is_noticed() -> None:
    model = rounded(0)
    link = Lying(model)
    link.publication = replace(link.publication, compact=Publication.of(0, rounded(1), steady_codec("int8")).compact)
    own = held(link, model)
    own.fetch(link.ref())
    assert link.asked == ["compact", "whole"]
    assert digest_of(own.received) == digest_of(model)


@pytest.mark.parametrize("lie", [{"codec": "zip"}, {"codec": "int4"}, {"digest": b"x" * 32}])
def test_a_compact_stream_that_cannot_be_read_is_passed_over(lie: dict[str, Any]) -> None:
    model = rounded(0)
    link = Lying(model)
    ref = link.ref()
    for name, value in lie.items():
        setattr(ref.compact, name, value)
    own = held(link, model)
    own.fetch(ref)
    assert link.asked[-1] == "whole"
    assert digest_of(own.received) == digest_of(model)


@pytest.mark.parametrize("rounding", ["zip", "int4", ""])
def test_a_change_with_an_unknown_rounding_is_passed_over(rounding: str) -> None:
    first, second, downlink = rounded(0, "fp16"), rounded(1, "fp16"), Downlink("int8", model="fp16")
    link = Lying(first)
    link.publication = Publication.of(0, first, steady_codec("fp16"))
    own = held(link, first)
    own.fetch(link.ref())
    link.change = downlink.publish(first, second, 1).publication
    assert link.change is not None
    link.publication = Publication.of(1, second, steady_codec("fp16"))
    change = pb.Change(version=1, digest=link.change.digest, size_bytes=10, codec="int8", rounded=rounding)
    own.fetch(link.ref(changes=[change]))
    assert link.asked == (["compact", "change", "compact"] if not rounding else ["compact", "compact"])
    assert digest_of(own.received) == digest_of(second)
    change.rounded, link.asked = "fp16", []
    again = held(link, first)
    link.publication = Publication.of(0, rounded(0, "fp16"), steady_codec("fp16"))
    again.fetch(link.ref())
    link.publication = Publication.of(1, second, steady_codec("fp16"))
    again.fetch(link.ref(changes=[change]))
    assert link.asked == ["compact", "change"], "the same change is followed when it is told how"


def test_a_model_that_came_in_front_of_its_task_is_not_fetched() -> None:
    model = rounded(0)
    link = Lying(model)
    link.unasked = list(link.publication.messages_from(0))
    own = held(link, model)
    own.fetch(own.next_task().train.model)
    assert link.asked == []
    assert digest_of(own.received) == link.publication.digest
    own.next_task()
    assert link.told == [b"", link.publication.digest]


@pytest.mark.parametrize("what", ["another", "torn", "damaged", "no chunks"])
def test_what_came_in_front_of_a_task_and_is_not_its_model_is_of_no_use(what: str) -> None:
    model, another = (rounded(seed, size=600_000) for seed in range(2))
    link = Lying(model)
    came = list(Publication.of(0, another if what == "another" else model).messages_from(0))
    link.unasked = {"torn": came[:-1], "damaged": [came[0][:-1] + b"?", *came[1:]], "no chunks": [b"?"]}.get(what, came)
    own = held(link, model)
    own.fetch(link.ref())
    link.asked.clear()
    answer = own.next_task()
    own.next_task()
    assert link.told == [link.publication.digest, b""]  # the memory was written over
    own.fetch(answer.train.model)
    assert link.asked
    assert digest_of(own.received) == link.publication.digest
