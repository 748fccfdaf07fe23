"""gRPC handlers for a service, from its descriptor; errors become status codes here and only here.

The generated `add_…_to_server` is not used, so that the streams of models and updates can carry
messages as the bytes that they are already.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from fairfleet.common.errors import (
    AnotherUpdateCounts,
    BadRequest,
    FleetError,
    LimitReached,
    TooSlow,
    UsageError,
)
from fairfleet.common.net.grpc_compression import refuse_compressed
from fairfleet.common.wire import ERROR_METADATA, RETRY_METADATA, STANDING_METADATA
from fairfleet.server.security.request_limits import RequestLimits
from fairfleet.server.storage import crash_points

log = logging.getLogger(__name__)

# Calls with a crash point between what they did and their answer.
ACKNOWLEDGED = frozenset(
    {
        "SendUpload",
        "ReportEvaluation",
        "ReportVerification",
        "Pause",
        "Resume",
        "Stop",
        "Continue",
        "Revoke",
    }
)
MAX_MESSAGE_CHARS = 2000  # of an error: it is sent as metadata, which callers limit
Context = grpc.aio.ServicerContext[Any, Any]


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    raw: frozenset[str],
    limits: RequestLimits,
    admit: Callable[[Any], None] = lambda request: None,
) -> grpc.GenericRpcHandler:
    """Return the handler of a service; `servicer` has a method for each RPC, with its name.

    The streamed side of the RPCs in `raw` is plain bytes. `admit` gets every request that is one
    message, before it is answered, and may refuse it.
    """
    handlers = _Handlers(limits, admit)
    methods = {
        method.name: handlers.method(method, getattr(servicer, method.name), method.name in raw)
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


class _Handlers:
    def __init__(self, limits: RequestLimits, admit: Callable[[Any], None]) -> None:
        self._limits, self._admit = limits, admit

    def method(
        self, method: MethodDescriptor, call: Callable[..., Any], raw: bool
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of one method.

        It parses requests itself: gRPC would report a malformed request as an internal error.
        """
        sends_bytes = raw and method.server_streaming
        write = None if sends_bytes else GetMessageClass(method.output_type).SerializeToString
        if method.client_streaming:
            assert raw, "no method receives a stream of parsed messages"
            return grpc.stream_unary_rpc_method_handler(
                self._unary(call, lambda stream: stream), None, write
            )
        parse = self._parsing(GetMessageClass(method.input_type))
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(call, parse), None, write)
        return grpc.unary_unary_rpc_method_handler(self._unary(call, parse), None, write)

    def _parsing(self, kind: type[Message]) -> Callable[[bytes], Message]:
        def parse(data: bytes) -> Message:
            try:
                request = kind.FromString(data)
            except DecodeError:
                self._limits.refusals.add("malformed")
                refuse_compressed(data)
                name = kind.DESCRIPTOR.name
                raise BadRequest(
                    f"the {len(data)} bytes of the request are not a serialized {name}"
                ) from None
            self._admit(request)
            return request

        return parse

    def _unary(
        self, call: Callable[[Any, Context], Awaitable[Any]], parse: Callable[[Any], Any]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            try:
                with self._limits.under_way.under_way():
                    response = await call(parse(request), context)
            except Exception as error:
                return self._refuse(context, error)
            if call.__name__ in ACKNOWLEDGED:
                crash_points.passed(f"what {call.__name__} did, before its answer")
            return response

        return answer

    def _streaming(
        self, call: Callable[[Any, Context], AsyncGenerator[Any]], parse: Callable[[bytes], Any]
    ) -> Callable[[Any, Context], Awaitable[None]]:
        assert inspect.isasyncgenfunction(call)

        async def answer(request: bytes, context: Context) -> None:
            try:
                with self._limits.under_way.under_way():
                    async with contextlib.aclosing(call(parse(request), context)) as messages:
                        async for message in messages:
                            await self._write(context, message)
            except Exception as error:
                self._refuse(context, error)

        return answer

    async def _write(self, context: Context, message: Any) -> None:
        """Send one message of a stream; cancel the call of a peer that does not read.

        Until then the call occupies memory and one of the peer's downloads.
        """
        try:
            async with asyncio.timeout(self._limits.limits.idle_seconds):
                await context.write(message)
        except TimeoutError:
            self._limits.refusals.add("slow_reader")
            # A status would wait behind the messages that the peer does not read. gRPC frees the
            # call when the connection ends.
            raise asyncio.CancelledError from None

    def _refuse(self, context: Context, error: Exception) -> None:
        if isinstance(error, (LimitReached, TooSlow)):
            self._limits.refusals.add(error.reason)
        refuse(context, error)


def refuse(context: Context, error: Exception) -> None:
    """Set the status of a call that failed; its handler then only has to return.

    `context.abort` is not used: its exception keeps the call alive in a reference cycle, until
    Python's garbage collector runs. Until then gRPC counts the stream as open, and a peer that
    is refused often could not open any more.
    """
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from None  # the caller closed the call during an answer
    if isinstance(error, FleetError) and not isinstance(error, UsageError):
        status, message = error.status, str(error)[:MAX_MESSAGE_CHARS]
    else:
        log.exception("a call failed because of an error in the server", exc_info=error)
        status = grpc.StatusCode.INTERNAL
        message = f"the server failed at this call ({type(error).__name__}); see its log"
    context.set_trailing_metadata(_error_metadata(error))
    context.set_code(status)
    context.set_details(message)


def _error_metadata(error: Exception) -> tuple[tuple[str, str | bytes], ...]:
    metadata: list[tuple[str, str | bytes]] = [(ERROR_METADATA, type(error).__name__)]
    if isinstance(error, LimitReached) and error.retry_seconds is not None:
        metadata.append((RETRY_METADATA, f"{error.retry_seconds:.3f}"))
    if isinstance(error, AnotherUpdateCounts):
        metadata.append((STANDING_METADATA, error.digest))
    return tuple(metadata)
