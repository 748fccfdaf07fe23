"""gRPC handlers made from a service's descriptor, and the one place where errors become status codes.

Made by hand instead of by the generated `add_…_to_server`, so that the two streams of the data plane
can carry messages as the bytes they already are.
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

from fairfleet.common.errors import BadRequest, FleetError, LimitReached, TooSlow, UsageError
from fairfleet.common.wire import ERROR_METADATA, RETRY_METADATA
from fairfleet.server import faults
from fairfleet.server.gate import Gate

log = logging.getLogger(__name__)

ACKNOWLEDGED = frozenset({"SendUpload", "ReportEvaluation", "ReportVerification", "Pause", "Resume", "Stop", "Revoke"})
MOST_WORDS = 2000  # of an error: it travels as metadata, of which a caller takes only so much
Context = grpc.aio.ServicerContext[Any, Any]


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    raw: frozenset[str],
    gate: Gate,
    admit: Callable[[Any], None] = lambda request: None,
) -> grpc.GenericRpcHandler:
    """Methods are found by the RPC's name; the streamed side of those in `raw` is plain bytes.

    `admit` sees every request that is one message, before it is answered, and may refuse it.
    """
    made = _Handlers(gate, admit)
    methods = {
        method.name: made.method(method, getattr(servicer, method.name), method.name in raw)
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


class _Handlers:
    def __init__(self, gate: Gate, admit: Callable[[Any], None]) -> None:
        self._gate = gate
        self._admit = admit

    def method(self, method: MethodDescriptor, call: Callable[..., Any], raw: bool) -> grpc.RpcMethodHandler[Any, Any]:
        """Requests are parsed here and not by gRPC, which would answer what it cannot parse with a bug of ours."""
        write = None if raw and method.server_streaming else GetMessageClass(method.output_type).SerializeToString
        if method.client_streaming:
            assert raw, "no stream of parsed messages comes in"
            return grpc.stream_unary_rpc_method_handler(self._unary(call, lambda stream: stream), None, write)
        parse = self._parsing(GetMessageClass(method.input_type))
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(call, parse), None, write)
        return grpc.unary_unary_rpc_method_handler(self._unary(call, parse), None, write)

    def _parsing(self, kind: type[Message]) -> Callable[[bytes], Message]:
        def parse(data: bytes) -> Message:
            try:
                request = kind.FromString(data)
            except DecodeError:
                self._gate.refusals.add("malformed")
                name = kind.DESCRIPTOR.name
                raise BadRequest(f"the {len(data)} bytes of the request are not a serialized {name}") from None
            self._admit(request)
            return request

        return parse

    def _unary(
        self, call: Callable[[Any, Context], Awaitable[Any]], parse: Callable[[Any], Any]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            try:
                with self._gate.under_way.under_way():
                    done = await call(parse(request), context)
            except Exception as error:
                return self._refuse(context, error)
            if call.__name__ in ACKNOWLEDGED:
                faults.passed(f"what {call.__name__} did, before its answer")
            return done

        return answer

    def _streaming(
        self, call: Callable[[Any, Context], AsyncGenerator[Any]], parse: Callable[[bytes], Any]
    ) -> Callable[[Any, Context], Awaitable[None]]:
        assert inspect.isasyncgenfunction(call)

        async def answer(request: bytes, context: Context) -> None:
            try:
                with self._gate.under_way.under_way():
                    async with contextlib.aclosing(call(parse(request), context)) as messages:
                        async for message in messages:
                            await self._write(context, message)
            except Exception as error:
                self._refuse(context, error)

        return answer

    async def _write(self, context: Context, message: Any) -> None:
        """One message of a stream; a caller that does not read on loses it, and with it what it holds."""
        try:
            async with asyncio.timeout(self._gate.limits.idle_seconds):
                await context.write(message)
        except TimeoutError:
            self._gate.refusals.add("slow_reader")
            # No status could reach it behind what it does not read; gRPC lets the call go when the connection ends.
            raise asyncio.CancelledError from None

    def _refuse(self, context: Context, error: Exception) -> None:
        if isinstance(error, (LimitReached, TooSlow)):
            self._gate.refusals.add(error.reason)
        refuse(context, error)


def refuse(context: Context, error: Exception) -> None:
    """Says what the call ends with; its handler has only to return.

    Not by `context.abort`: the exception that it raises holds on to the call, in a ring that only Python's collector
    undoes. Till then gRPC counts its stream as open, and a peer that is refused often enough would get no other.
    """
    mark = [(ERROR_METADATA, type(error).__name__)]
    if isinstance(error, LimitReached) and error.retry_seconds is not None:
        mark.append((RETRY_METADATA, f"{error.retry_seconds:.3f}"))
    if isinstance(error, FleetError) and not isinstance(error, UsageError):
        status, words = error.status, str(error)[:MOST_WORDS]
    elif isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from None  # the caller hung up in the middle of an answer
    else:
        log.exception("a call failed by our own fault", exc_info=error)
        status, words = (
            grpc.StatusCode.INTERNAL,
            f"the server failed at this call ({type(error).__name__}); see its log",
        )
    context.set_trailing_metadata(tuple(mark))
    context.set_code(status)
    context.set_details(words)
