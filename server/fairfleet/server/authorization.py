"""Who may call what: one table, and the interceptor that applies it to every call, of whatever service.

A call without a row is nobody's. It also gives the call its identity (`callers.caller`), by which the Fleet service
tells one client from another, counts it, whatever is in it, and knows all calls under way, so that a revocation ends
them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio

from fairfleet.common.certificates import Certified, certified
from fairfleet.common.errors import FleetError, NotAllowed
from fairfleet.common.identity import NOBODY, Identity, Role
from fairfleet.server.callers import OpenCalls, caller
from fairfleet.server.handlers import Context, refuse

CLIENT, OPERATOR = frozenset({Role.CLIENT}), frozenset({Role.OPERATOR})
MEMBERS = CLIENT | OPERATOR

TABLE: dict[str, frozenset[Role]] = {
    "/fairfleet.v1.Fleet/Join": CLIENT,
    "/fairfleet.v1.Fleet/NextTask": CLIENT,
    "/fairfleet.v1.Fleet/TakeTask": CLIENT,
    "/fairfleet.v1.Fleet/FetchModel": CLIENT,
    "/fairfleet.v1.Fleet/OpenUpload": CLIENT,
    "/fairfleet.v1.Fleet/SendUpload": CLIENT,
    "/fairfleet.v1.Fleet/ReportEvaluation": CLIENT,
    "/fairfleet.v1.Fleet/ReportVerification": CLIENT,
    "/fairfleet.v1.Fleet/Heartbeat": CLIENT,
    "/fairfleet.v1.Fleet/Leave": CLIENT,
    "/fairfleet.v1.Operator/Status": OPERATOR,
    "/fairfleet.v1.Operator/Watch": OPERATOR,
    "/fairfleet.v1.Operator/Rounds": OPERATOR,
    "/fairfleet.v1.Operator/Clients": OPERATOR,
    "/fairfleet.v1.Operator/Pause": OPERATOR,
    "/fairfleet.v1.Operator/Resume": OPERATOR,
    "/fairfleet.v1.Operator/Stop": OPERATOR,
    "/fairfleet.v1.Operator/Revoke": OPERATOR,
    "/fairfleet.v1.Operator/MakeToken": OPERATOR,
    "/fairfleet.v1.Operator/ExportModel": OPERATOR,
    "/fairfleet.v1.Enrolment/Enrol": frozenset({Role.NOBODY}),  # who has a certificate renews it
    "/fairfleet.v1.Enrolment/Renew": MEMBERS,
    "/grpc.health.v1.Health/Check": MEMBERS,
    "/grpc.health.v1.Health/List": MEMBERS,
    "/grpc.health.v1.Health/Watch": OPERATOR,  # it is held open, and no limit of a client's knows it
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATOR,
}

KINDS: dict[str, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def allow(method: str, who: Identity) -> None:
    allowed = TABLE.get(method, frozenset())
    if who.role not in allowed:
        wanted = " or ".join(sorted(allowed - {Role.NOBODY})) or "nobody with one"
        found = f"this is {who}'s" if who != NOBODY else "there was none"
        raise NotAllowed(f"{method} needs a certificate of {wanted}; {found}")


def shown_by(context: Context) -> Certified | None:
    """What the peer's certificate says, if there is one."""
    shown = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
    return certified(bytes(shown)) if shown else None


def identity_behind(context: Context, now: datetime) -> Identity:
    """By the certificate, whose signature was verified in the handshake; its end may have come since then."""
    said = shown_by(context)
    if said is None:
        return NOBODY
    if not said.begins <= now < said.ends:
        raise NotAllowed(f"the certificate of {said.identity} ended on {said.ends:%Y-%m-%d %H:%M} UTC; renew it")
    return said.identity


class Authorization(grpc.aio.ServerInterceptor):
    def __init__(
        self, calls: OpenCalls, count: Callable[[Identity], None], refuse_revoked: Callable[[Identity], None]
    ) -> None:
        self._calls, self._count, self._refuse_revoked = calls, count, refuse_revoked
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # there is no such call: gRPC says so
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        kind = next(kind for kind in KINDS if getattr(handler, kind))
        call = getattr(handler, kind)
        guard = self._streaming if inspect.isasyncgenfunction(call) else self._awaited
        return KINDS[kind](guard(method, call), handler.request_deserializer, handler.response_serializer)

    def _admit(self, method: str, context: Context) -> Identity:
        who = identity_behind(context, datetime.now(UTC))
        self._count(who)
        allow(method, who)
        self._refuse_revoked(who)
        caller.set(who)
        return who

    def _awaited(self, method: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                with self._calls.of(self._admit(method, context)):
                    return await call(request, context)
            except FleetError as error:
                refuse(context, error)

        return guarded

    def _streaming(self, method: str, call: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                with self._calls.of(self._admit(method, context)) as under_way:
                    async for message in call(request, context):
                        with under_way.sending():
                            yield message
            except FleetError as error:
                refuse(context, error)

        return guarded
