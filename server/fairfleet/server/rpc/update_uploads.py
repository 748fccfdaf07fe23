"""Uploads of updates: open one, receive its stream, and count what is refused."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fairfleet.common.errors import (
    AnotherUpdateCounts,
    BadRequest,
    Corrupted,
    LimitReached,
    Refused,
    TryLater,
    WrongState,
    short,
)
from fairfleet.common.names import round_name
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.receipts import Receipt
from fairfleet.server.rpc.fleet_messages import announced_update
from fairfleet.server.rpc.upload_stream import UploadStream
from fairfleet.server.security.caller import check_speaks_for
from fairfleet.server.transfer.codec_selection import Uplinks
from fairfleet.server.transfer.upload import Upload

log = logging.getLogger(__name__)

COUNTED_REFUSALS: tuple[type[Refused], ...] = (
    AnotherUpdateCounts,
    BadRequest,
    Corrupted,
    LimitReached,
)


class UpdateUploads:
    """The uploads of all clients, from the announcement to the receipt."""

    def __init__(self, coordinator: Coordinator, uplinks: Uplinks, *, is_private: bool) -> None:
        """`uplinks` is updated by each upload; `is_private` means that clients add noise."""
        self._coordinator, self._receiver = coordinator, coordinator.update_receiver
        self._uplinks, self._is_private = uplinks, is_private
        # By client: the last round in which a refusal was logged.
        self._refusal_logged: dict[str, int] = {}

    async def open(self, request: pb.OpenUploadRequest) -> Upload | Receipt:
        """Return the upload of an announced update, or its receipt if it needs no upload."""
        coordinator = self._coordinator
        member = coordinator.clients.session(request.session).member
        with self._counting_refusals(member.client, WrongState):
            announced = announced_update(member.client, request, is_private=self._is_private)
            lacks = coordinator.runner.committer.lacks_initial_loss(member.client, request.round)
            wanted = lacks and member.measures_initial_loss
            coordinator.report_requirements.check(announced.report, wants_initial_loss=wanted)
            codecs = coordinator.codecs.accepted(member.client, request.round, member.codecs)
            opened = await self._receiver.open(announced, request.model_digest, codecs)
        traffic = coordinator.state.traffic
        if isinstance(opened, Receipt):
            traffic.outcomes["repeated" if opened.counted else "late"] += 1
        else:
            traffic.resumed += opened.offset_bytes > 0
        return opened

    def opened(self, token: bytes) -> Upload:
        """Return the upload with this token; it must be the caller's."""
        upload = self._receiver.under_way(token)
        check_speaks_for(upload.announced.client, "the upload is another client's")
        return upload

    async def receive(self, upload: Upload, token: bytes, stream: AsyncIterator[bytes]) -> Receipt:
        """Receive the chunks of an upload that was opened, and return its receipt."""
        client = upload.announced.client
        with self._explaining(upload), self._coordinator.clients.transferring(client):
            receipt = await self._receive(upload, token, stream)
        self._coordinator.state.traffic.outcomes["late"] += not receipt.counted
        return receipt

    async def _receive(self, upload: Upload, token: bytes, stream: AsyncIterator[bytes]) -> Receipt:
        receiver, limits = self._receiver, self._coordinator.request_limits
        client, size_bytes = upload.announced.client, upload.announced.size_bytes
        chunks = UploadStream(
            upload,
            lambda messages: receiver.take_chunks(upload, token, messages),
            lambda: limits.batch(size_bytes),
            lambda taking, messages: receiver.keep_chunks(upload, token, taking, messages),
        )
        async with limits.upload(client):
            with self._counting_refusals(client), receiver.streams.live(client, chunks):
                with self._measuring(upload):
                    paced = limits.paced(stream, size_bytes - upload.offset_bytes)
                    rest = await chunks.receive(paced)
                return await receiver.complete(upload, token, rest)

    @contextmanager
    def _explaining(self, upload: Upload) -> Iterator[None]:
        """Name the update in errors, and discard what cannot become an update any more."""
        try:
            yield
        except (AnotherUpdateCounts, LimitReached):
            raise
        except Refused as error:
            if isinstance(error, BadRequest):
                self._receiver.discard(upload)
            announced = upload.announced
            raise type(error)(
                f"update of {announced.client} for {round_name(announced.round)}: {error}"
            ) from None
        except OSError as error:
            # What is on the disk may differ from what was received.
            self._receiver.discard(upload)
            raise TryLater(f"the server cannot write to its disk: {error.strerror}") from error

    @contextmanager
    def _counting_refusals(self, client: str, *more: type[Refused]) -> Iterator[None]:
        """Count each refused update; log a client's first one in each round."""
        try:
            yield
        except COUNTED_REFUSALS + more as error:
            self._coordinator.state.traffic.refused(error)
            self._log_refusal(client, error)
            raise

    def _log_refusal(self, client: str, error: Refused) -> None:
        round_number = self._coordinator.state.round.number
        if self._refusal_logged.get(client) == round_number:
            return
        self._refusal_logged[client] = round_number
        fields = {"client": client, "round": round_number}
        log.warning("an update of %s was refused: %s", client, short(str(error), 300), extra=fields)

    @contextmanager
    def _measuring(self, upload: Upload) -> Iterator[None]:
        """Measure the client's uplink, for clients whose codec depends on it."""
        began = time.monotonic()
        remaining_bytes = upload.announced.size_bytes - upload.offset_bytes
        yield
        self._uplinks.saw(upload.announced.client, remaining_bytes, time.monotonic() - began)
