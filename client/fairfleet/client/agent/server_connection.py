"""The calls that a client makes to its server, over one connection that survives failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from fairfleet.client.agent.call_errors import standing_digest
from fairfleet.client.agent.fleet_session import FleetSession
from fairfleet.client.agent.pauses import CALL_SECONDS
from fairfleet.client.agent.task_poll import TaskPoll
from fairfleet.common.wire import ANNOUNCED_METADATA, UPLOAD_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)


class ServerConnection(FleetSession):
    """What a client sends and receives, each call in its present session."""

    def next_task(
        self,
        held_digest: Callable[[], bytes] = bytes,
        receive: Callable[[Iterator[bytes]], object] = list,
    ) -> pb.NextTaskResponse:
        """Wait for the next task and return it.

        The server may send a model first, unless `held_digest()` is its digest; `receive` gets the
        chunks. If the connection breaks during the model, only the task is requested again: a poll
        starts with the first chunk each time, but a fetched model continues where it broke.
        """
        poll = TaskPoll(held_digest, receive, self.counters)

        def ask(session: str, **counts: int) -> pb.NextTaskResponse:
            take = self._take if self.joined.brings_models else None
            return poll.ask(take, self._stub, session, **counts)

        return self.repeat(lambda session: self.counts.tell(session, self.joined, ask))

    def open_upload(self, **fields: Any) -> pb.OpenUploadResponse:
        """Announce an update; return its receipt, or where to continue the upload."""
        answer: pb.OpenUploadResponse = self._unary("OpenUpload", pb.OpenUploadRequest, **fields)
        return answer

    def report_evaluation(self, **fields: Any) -> None:
        """Send the result of an evaluation."""
        self._unary("ReportEvaluation", pb.ReportEvaluationRequest, **fields)

    def report_verification(self, **fields: Any) -> None:
        """Send the losses of the trials of a step."""
        self._unary("ReportVerification", pb.ReportVerificationRequest, **fields)

    def heartbeat(self, **fields: Any) -> pb.HeartbeatResponse:
        """Send progress or a failure; return whether to go on."""
        answer: pb.HeartbeatResponse = self._unary("Heartbeat", pb.HeartbeatRequest, **fields)
        return answer

    def _unary(self, method: str, make_request: Callable[..., Any], **fields: Any) -> Any:
        return self.repeat(
            lambda session: getattr(self._stub, method)(
                make_request(session=session, **fields), timeout=CALL_SECONDS
            )
        )

    def fetch(self, version: int, offset_bytes: int, session: str, **form: bool) -> Iterable[bytes]:
        """Try once to fetch a model, or another form of it (`change`, `compact`).

        To be called inside `repeat`.
        """
        request = pb.FetchModelRequest(
            session=session, version=version, offset_bytes=offset_bytes, **form
        )
        return self.counters.counting_received(self._fetch(request))

    def send(self, upload: bytes, messages: Iterator[bytes]) -> pb.Receipt | None:
        """Try once to send the rest of an upload.

        Return None if the stream broke: open the upload again to learn where to continue.
        """
        return self._stream(messages, UPLOAD_METADATA, upload)

    def open_and_send(self, messages: Iterator[bytes], **fields: Any) -> pb.Receipt | None:
        """Try once to announce and send a new upload in one call; None if the stream broke."""
        self._check_federation()
        announced = pb.OpenUploadRequest(session=self.joined.session, **fields)
        return self._stream(messages, ANNOUNCED_METADATA, announced.SerializeToString())

    def _stream(self, messages: Iterator[bytes], key: str, value: bytes) -> pb.Receipt | None:
        try:
            counted = self.counters.counting_sent(messages)
            response: pb.SendUploadResponse = self._send(counted, metadata=((key, value),))
            return response.receipt
        except (grpc.RpcError, ValueError) as error:
            code = self._code(error)
            # FAILED_PRECONDITION means that the upload is not open (any more). But if another
            # update has the receipt, the refusal is final.
            is_open = code is not grpc.StatusCode.FAILED_PRECONDITION
            if is_open or standing_digest(error) is not None:
                self._raise_if_final(error, code)
            self.counters.retries += 1
            log.info("the upload was interrupted: %s", self._describe(error, code))
            return None
