"""gRPC handlers made from a service's descriptor, and the one place where errors become status codes.

Made by hand instead of by the generated `add_…_to_server`, so that the two streams of the data plane
can carry messages as the bytes they already are.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from fairfleet.common.errors import FleetError, UsageError
from fairfleet.common.wire import ERROR_METADATA
from fairfleet.server import faults

log = logging.getLogger(__name__)

ACKNOWLEDGED = frozenset({"SendUpload", "ReportEvaluation", "ReportVerification", "Pause", "Resume", "Stop", "Revoke"})
Context = grpc.aio.ServicerContext[Any, Any]


def service_handler(service: ServiceDescriptor, servicer: object, raw: frozenset[str]) -> grpc.GenericRpcHandler:
    """Methods are found by the RPC's name; the streamed side of those in `raw` is plain bytes."""
    methods = {
        method.name: _method(method, getattr(servicer, method.name), method.name in raw) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _method(method: MethodDescriptor, call: Callable[..., Any], raw: bool) -> grpc.RpcMethodHandler[Any, Any]:
    read = None if raw and method.client_streaming else GetMessageClass(method.input_type).FromString
    write = None if raw and method.server_streaming else GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(_unary(call), read, write)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(call), read, write)
    return grpc.unary_unary_rpc_method_handler(_unary(call), read, write)


def _unary(call: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: Any, context: Context) -> Any:
        try:
            done = await call(request, context)
        except Exception as error:
            await _abort(context, error)
        if call.__name__ in ACKNOWLEDGED:
            faults.passed(f"what {call.__name__} did, before its answer")
        return done

    return answer


def _streaming(call: Callable[[Any, Context], AsyncIterator[Any]]) -> Callable[[Any, Context], AsyncIterator[Any]]:
    assert inspect.isasyncgenfunction(call)

    async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in call(request, context):
                yield message
        except Exception as error:
            await _abort(context, error)

    return answer


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, (grpc.aio.AbortError, asyncio.CancelledError)):
        raise error
    mark = ((ERROR_METADATA, type(error).__name__),)
    if isinstance(error, FleetError) and not isinstance(error, UsageError):
        await context.abort(error.status, str(error), mark)
    log.exception("a call failed by our own fault", exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"the server failed at this call ({type(error).__name__}); see its log", mark
    )
