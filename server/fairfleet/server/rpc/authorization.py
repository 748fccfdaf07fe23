"""Who may call what: one table, and the interceptor that applies it to every call of every service.

A method without a row is refused to everybody. The interceptor also sets the call's identity
(`security.caller`), counts the call whatever it contains, and registers it, so that a revocation
can end it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio

from fairfleet.common.errors import FleetError, NotAllowed
from fairfleet.common.pki.certificates import CertificateInfo, certified
from fairfleet.common.pki.identity import NOBODY, Identity, Role
from fairfleet.server.rpc.handlers import Context, refuse
from fairfleet.server.security.caller import OpenCalls, caller

CLIENT, OPERATOR = frozenset({Role.CLIENT}), frozenset({Role.OPERATOR})
MEMBERS = CLIENT | OPERATOR

# Which roles may call a method.
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
    "/fairfleet.v1.Operator/Continue": OPERATOR,
    "/fairfleet.v1.Operator/Revoke": OPERATOR,
    "/fairfleet.v1.Operator/MakeToken": OPERATOR,
    "/fairfleet.v1.Operator/ExportModel": OPERATOR,
    "/fairfleet.v1.Operator/Models": OPERATOR,
    "/fairfleet.v1.Operator/Audit": OPERATOR,
    "/fairfleet.v1.Enrolment/Enrol": frozenset(
        {Role.NOBODY}
    ),  # a peer with a certificate renews it
    "/fairfleet.v1.Enrolment/Renew": MEMBERS,
    "/grpc.health.v1.Health/Check": MEMBERS,
    "/grpc.health.v1.Health/List": MEMBERS,
    "/grpc.health.v1.Health/Watch": OPERATOR,  # it stays open, and no limit of clients covers it
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATOR,
}

KINDS: dict[str, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def allow(method: str, who: Identity) -> None:
    """Raise NotAllowed unless this identity may call the method."""
    allowed = TABLE.get(method, frozenset())
    if who.role not in allowed:
        expected = " or ".join(sorted(allowed - {Role.NOBODY})) or "nobody with one"
        actual = f"this is {who}'s" if who != NOBODY else "there was none"
        raise NotAllowed(f"{method} needs a certificate of {expected}; {actual}")


def peer_certificate(context: Context) -> CertificateInfo | None:
    """Return what the peer's certificate says, or None without one."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
    return certified(bytes(certificate)) if certificate else None


def peer_identity(context: Context, now: datetime) -> Identity:
    """Return the identity in the peer's certificate; raise NotAllowed if the certificate expired.

    The handshake verified the signature, but the certificate may have expired since then.
    """
    certificate = peer_certificate(context)
    if certificate is None:
        return NOBODY
    if not certificate.begins <= now < certificate.ends:
        raise NotAllowed(
            f"the certificate of {certificate.identity} expired on "
            f"{certificate.ends:%Y-%m-%d %H:%M} UTC; renew it"
        )
    return certificate.identity


class Authorization(grpc.aio.ServerInterceptor):
    """Refuses calls that the table does not allow, and calls of revoked peers."""

    def __init__(
        self,
        calls: OpenCalls,
        count: Callable[[Identity], None],
        refuse_revoked: Callable[[Identity], None],
    ) -> None:
        """`count` raises LimitReached after too many calls, `refuse_revoked` raises Revoked."""
        self._calls, self._count, self._refuse_revoked = calls, count, refuse_revoked
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler with the checks around it."""
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # gRPC reports that there is no such method
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        kind = next(kind for kind in KINDS if getattr(handler, kind))
        call = getattr(handler, kind)
        guard = self._streaming if inspect.isasyncgenfunction(call) else self._awaited
        return KINDS[kind](
            guard(method, call), handler.request_deserializer, handler.response_serializer
        )

    def _admit(self, method: str, context: Context) -> Identity:
        who = peer_identity(context, datetime.now(UTC))
        self._count(who)
        allow(method, who)
        self._refuse_revoked(who)
        caller.set(who)
        return who

    def _awaited(
        self, method: str, call: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                with self._calls.of(self._admit(method, context)):
                    return await call(request, context)
            except FleetError as error:
                refuse(context, error)

        return guarded

    def _streaming(
        self, method: str, call: Callable[..., AsyncIterator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                with self._calls.of(self._admit(method, context)) as under_way:
                    async for message in call(request, context):
                        with under_way.sending():
                            yield message
            except FleetError as error:
                refuse(context, error)

        return guarded
