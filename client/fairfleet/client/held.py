"""The model as a client holds it: fetched whole, or brought up to date by what changed since, and verified."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

from fairfleet.client.link import Link
from fairfleet.common import wire
from fairfleet.common.codecs import RAW32, Codec, codec_named, round_to, steady_codec
from fairfleet.common.errors import BadRequest, Corrupted, NotKept, OutOfOrder
from fairfleet.common.stream import Decoder, digest_of
from fairfleet.common.tensors import Model, Signature, add_change
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)

DAMAGED_TRANSFERS = 3  # of the same model or update: then it is not the link that is at fault


class HeldModel:
    """Memory for the received model, in the server's tensor order, and for the trained one; both stay.

    Between trainings the second may hold a step: the change that leads to the next version, or 2^-k of it.
    """

    def __init__(self, link: Link, own: Signature) -> None:
        self._link = link
        self._own = own  # of the task's model
        self._models: tuple[Model, Model] | None = None
        self._version: tuple[int, bytes] | None = None  # and digest, of the received model
        self._step: bytes | None = None  # digest of the step in the other one's memory
        self._came: Decoder | None = None  # what is in the first one's, if it came in front of a task

    @property
    def received(self) -> Model:
        return self._memory()[0]

    @property
    def trained(self) -> Model:
        """For the caller to write to."""
        self._step = None
        return self._memory()[1]

    def next_task(self) -> pb.NextTaskResponse:
        """Waits for one; its model may be here then."""
        return self._link.next_task(lambda: self._version[1] if self._version else b"", self._receive_unasked)

    def _receive_unasked(self, messages: Iterator[bytes]) -> None:
        """A model in front of its task, which will say what it is. What cannot be read will be fetched."""
        self._came = None
        for message in messages:
            try:
                if self._came is None:
                    self._version, self._came = None, Decoder(self.received, RAW32)
                self._came.take(message)
            except (BadRequest, Corrupted, OutOfOrder) as error:
                log.info("a model cannot be read as it came, it will be fetched: %s", error)
                deque(messages, maxlen=0)  # the task is at the end

    def _is_here(self, wanted: pb.ModelRef, came: Decoder | None) -> bool:
        with contextlib.suppress(Corrupted, OutOfOrder):
            if came is not None:
                came.finish(wanted.digest)
                return True
        return self._version is not None and self._version[1] == wanted.digest

    def fetch(self, wanted: pb.ModelRef) -> None:
        """Makes `received` the wanted version, downloading only what is not here yet."""
        came, self._came = self._came, None
        if not self._is_here(wanted, came):
            steps = self._steps_to(wanted)
            self._version = None
            if not (steps and self._follow(steps, wanted)):
                self._fetch_whole(wanted, came)
        self._version = (wanted.version, wanted.digest)

    def _fetch_whole(self, wanted: pb.ModelRef, begun: Decoder | None) -> None:
        """`begun` has the first chunks, if they are of the wanted model."""
        if wanted.HasField("compact") and self._fetch_compact(wanted.version, wanted.compact, wanted.digest):
            return
        if begun is not None and not wanted.HasField("compact"):
            try:
                self._receive(wanted.version, begun, wanted.digest, {})
                return
            except (Corrupted, OutOfOrder) as error:
                log.info("version %d is fetched from its beginning: %s", wanted.version, error)
        self._download(wanted.version, wanted.digest, RAW32, self.received)

    def _fetch_compact(self, version: int, compact: pb.Compact, wanted: bytes) -> bool:
        """Whether the shorter stream held the wanted model, bit for bit."""
        try:
            self._download(version, compact.digest, codec_named(compact.codec), self.received, compact=True)
        except (BadRequest, Corrupted, OutOfOrder) as error:
            log.warning("version %d in %s cannot be read, it is fetched as raw32: %s", version, compact.codec, error)
            return False
        if digest_of(self.received) == wanted:
            return True
        log.warning("version %d in %s is not that model; it is fetched as raw32", version, compact.codec)
        return False

    def fetch_step(self, step: pb.Change) -> Model:
        """The change that a step would make; it stays until the next training."""
        if self._step != step.digest:
            self._fetch_change(step)
        return self._memory()[1]

    def _fetch_change(self, step: pb.Change) -> None:
        self._download(step.version, step.digest, codec_named(step.codec), self.trained, change=True)
        self._step = step.digest

    def _steps_to(self, wanted: pb.ModelRef) -> list[pb.Change]:
        """The changes from the held version to the wanted one; none where fetching it whole is shorter."""
        if self._version is None:
            return []
        steps = [change for change in wanted.changes if change.version > self._version[0]]
        missing = list(range(self._version[0] + 1, wanted.version + 1))
        whole = [step.version for step in steps] == missing
        to_fetch = sum(step.size_bytes for step in steps if step.digest != self._step)
        return steps if whole and to_fetch < (wanted.compact.size_bytes or wanted.size_bytes) else []

    def _follow(self, steps: list[pb.Change], wanted: pb.ModelRef) -> bool:
        """Whether the changes led to the wanted model, bit for bit."""
        try:
            for step in steps:
                steady = steady_codec(step.rounded) if step.rounded else None
                before, change = self.received, self.fetch_step(step)
                add_change(before, change, step.halvings, out=change)  # as the server does
                if steady:
                    round_to(steady, change.parameters)
                self._models, self._step = (change, before), None
        except (NotKept, BadRequest, Corrupted, OutOfOrder) as error:
            log.info("the changes to version %d cannot be had, it is fetched whole: %s", wanted.version, error)
            return False
        if digest_of(self.received) == wanted.digest:
            return True
        log.warning("the changes do not lead to version %d; it is fetched whole", wanted.version)
        return False

    def _download(self, version: int, digest: bytes, codec: Codec, into: Model, **form: bool) -> None:
        for tries in range(1, DAMAGED_TRANSFERS + 1):
            try:
                self._receive(version, Decoder(into, codec), digest, form)
                return
            except (Corrupted, OutOfOrder) as error:
                if tries == DAMAGED_TRANSFERS:
                    raise
                log.info("fetching version %d again: %s", version, error)

    def _receive(self, version: int, decoder: Decoder, digest: bytes, form: dict[str, bool]) -> None:
        def go_on(session: str) -> None:
            for message in self._link.fetch(version, decoder.offset_bytes, session, **form):
                decoder.take(message)

        self._link.repeat(go_on)
        decoder.finish(digest)

    def _memory(self) -> tuple[Model, Model]:
        if self._models is None:
            signature = wire.signature_in(self._link.joined.signature)
            difference = signature.difference(self._own)
            if difference:
                raise BadRequest(f"this task's model is not the federation's: {difference}")
            self._models = Model.empty(signature), Model.empty(signature)
        return self._models
