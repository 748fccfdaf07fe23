"""The newest model that a client has, verified against its announced digest.

It is downloaded as a whole, or updated by the changes since the version that the client has.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.common import wire
from fairfleet.common.chunk_stream import Decoder, digest_of
from fairfleet.common.codecs import RAW32, Codec, codec_named, round_to, steady_codec
from fairfleet.common.errors import BadRequest, Corrupted, NotKept, OutOfOrder
from fairfleet.common.tensors import Model, Signature, add_change
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)

DAMAGED_TRANSFERS = 3  # of the same model or update; then the connection is not the cause


class ModelCache:
    """Memory for the received model, in the server's tensor order, and for the trained one.

    The memory is allocated once. Between trainings the second model may contain a step: the change
    that leads to the next version, or 2^-k of it.
    """

    def __init__(self, connection: ServerConnection, own: Signature) -> None:
        self._connection = connection
        self._own = own  # of the task's model
        self._models: tuple[Model, Model] | None = None  # received, trained
        self._version: tuple[int, bytes] | None = None  # and digest, of the received model
        self._step: bytes | None = None  # digest of the step in the second model
        # The decoder of a model that arrived before its task; it writes to the first model.
        self._early: Decoder | None = None

    @property
    def received(self) -> Model:
        """The received model."""
        return self._memory()[0]

    @property
    def trained(self) -> Model:
        """The memory for the trained model, which the caller may overwrite."""
        self._step = None
        return self._memory()[1]

    def forget(self) -> None:
        """Drop the models: those of another federation may have another order of tensors."""
        self._models = self._version = self._step = self._early = None

    @property
    def held(self) -> tuple[int, bytes] | None:
        """Version and digest of the received model; None if there is none that is complete."""
        return self._version

    def next_task(self) -> pb.NextTaskResponse:
        """Wait for the next task and return it. Its model may arrive before it."""
        return self._connection.next_task(
            lambda: self._version[1] if self._version else b"", self._receive_early
        )

    def _receive_early(self, messages: Iterator[bytes]) -> None:
        """Receive a model that arrives before the task that identifies it.

        A model that cannot be read is fetched later.
        """
        self._early = None
        for message in messages:
            try:
                if self._early is None:
                    self._version, self._early = None, Decoder(self.received, RAW32)
                self._early.take(message)
            except (BadRequest, Corrupted, OutOfOrder) as error:
                log.info("a model sent ahead of its task cannot be read and is fetched: %s", error)
                deque(messages, maxlen=0)  # read on, because the task is at the end of the stream

    def _is_present(self, ref: pb.ModelRef, early: Decoder | None) -> bool:
        with contextlib.suppress(Corrupted, OutOfOrder):
            if early is not None:
                early.finish(ref.digest)
                return True
        return self._version is not None and self._version[1] == ref.digest

    def fetch(self, ref: pb.ModelRef) -> None:
        """Make `received` the referenced version, downloading only what is missing."""
        early, self._early = self._early, None
        if not self._is_present(ref, early):
            steps = self._steps_to(ref)
            self._version = None
            if not (steps and self._apply_steps(steps, ref)):
                self._fetch_all(ref, early)
        self._version = (ref.version, ref.digest)

    def _fetch_all(self, ref: pb.ModelRef, begun: Decoder | None) -> None:
        """Download the model as a whole; `begun` may have its first chunks already."""
        if ref.HasField("compact") and self._fetch_compact(ref.version, ref.compact, ref.digest):
            return
        if begun is not None and not ref.HasField("compact"):
            try:
                self._receive(ref.version, begun, ref.digest, {})
                return
            except (Corrupted, OutOfOrder) as error:
                log.info("version %d is fetched from its beginning: %s", ref.version, error)
        self._download(ref.version, ref.digest, RAW32, self.received)

    def _fetch_compact(self, version: int, compact: pb.Compact, digest: bytes) -> bool:
        """Fetch the compressed form; return whether it is exactly the model of this digest."""
        try:
            self._download(
                version, compact.digest, codec_named(compact.codec), self.received, compact=True
            )
        except (BadRequest, Corrupted, OutOfOrder) as error:
            log.warning(
                "version %d in %s cannot be read, it is fetched as raw32: %s",
                version,
                compact.codec,
                error,
            )
            return False
        if digest_of(self.received) == digest:
            return True
        log.warning(
            "version %d in %s is not that model; it is fetched as raw32", version, compact.codec
        )
        return False

    def fetch_beside(self, ref: pb.ModelRef) -> None:
        """Download another version into the memory of the trained model, until it is overwritten.

        The received model stays as it is.
        """
        self._download(ref.version, ref.digest, RAW32, self.trained)

    def fetch_step(self, step: pb.Change) -> Model:
        """Return the change that a step would make. It stays valid until the next training."""
        if self._step != step.digest:
            self._fetch_change(step)
        return self._memory()[1]

    def _fetch_change(self, step: pb.Change) -> None:
        self._download(
            step.version, step.digest, codec_named(step.codec), self.trained, change=True
        )
        self._step = step.digest

    def _steps_to(self, ref: pb.ModelRef) -> list[pb.Change]:
        """Return the changes from the present version to the referenced one.

        Return none if one is missing, or if the download of the whole model is shorter.
        """
        if self._version is None:
            return []
        steps = [change for change in ref.changes if change.version > self._version[0]]
        missing = list(range(self._version[0] + 1, ref.version + 1))
        if [step.version for step in steps] != missing:
            return []
        step_bytes = sum(step.size_bytes for step in steps if step.digest != self._step)
        return steps if step_bytes < (ref.compact.size_bytes or ref.size_bytes) else []

    def _apply_steps(self, steps: list[pb.Change], ref: pb.ModelRef) -> bool:
        """Apply the changes; return whether they lead exactly to the referenced model."""
        try:
            for step in steps:
                codec = steady_codec(step.rounded) if step.rounded else None
                before, change = self.received, self.fetch_step(step)
                add_change(before, change, step.halvings, out=change)  # as the server does
                if codec:
                    round_to(codec, change.parameters)
                self._models, self._step = (change, before), None
        except (NotKept, BadRequest, Corrupted, OutOfOrder) as error:
            log.info(
                "the changes to version %d cannot be applied, the whole model is fetched: %s",
                ref.version,
                error,
            )
            return False
        if digest_of(self.received) == ref.digest:
            return True
        log.warning(
            "the changes do not lead to version %d; the whole model is fetched", ref.version
        )
        return False

    def _download(
        self, version: int, digest: bytes, codec: Codec, into: Model, **form: bool
    ) -> None:
        """Fetch a stream from its beginning, again if it arrives damaged."""
        for tries in range(1, DAMAGED_TRANSFERS + 1):
            try:
                self._receive(version, Decoder(into, codec), digest, form)
                return
            except (Corrupted, OutOfOrder) as error:
                if tries == DAMAGED_TRANSFERS:
                    raise
                log.info("fetching version %d again: %s", version, error)

    def _receive(
        self, version: int, decoder: Decoder, digest: bytes, form: dict[str, bool]
    ) -> None:
        """Fetch the rest of a stream, from where the decoder is, and check its digest."""

        def fetch_rest(session: str) -> None:
            for message in self._connection.fetch(version, decoder.offset_bytes, session, **form):
                decoder.take(message)

        self._connection.repeat(fetch_rest)
        decoder.finish(digest)

    def _memory(self) -> tuple[Model, Model]:
        if self._models is None:
            signature = wire.signature_in(self._connection.joined.signature)
            difference = signature.difference(self._own)
            if difference:
                raise BadRequest(f"this task's model is not the federation's: {difference}")
            self._models = Model.empty(signature), Model.empty(signature)
        return self._models
