"""Who gets in: TLS or clear text, the check of every call, and the port for devices that have no certificate yet.

Clear text is for this machine only, unless `insecure` says that it is meant; then nobody is checked.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from fairfleet.common.addresses import is_loopback
from fairfleet.common.errors import LimitReached, UsageError
from fairfleet.common.identity import Identity, Role
from fairfleet.common.keepalive import SERVER_OPTIONS
from fairfleet.common.pki_folder import CA, CA_KEY
from fairfleet.common.private_files import read_private
from fairfleet.proto.v1 import enrolment_pb2
from fairfleet.server.authorization import Authorization
from fairfleet.server.connection_limits import enrolment_limits
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.enrolling import Enrolling
from fairfleet.server.enrolment_service import EnrolmentService
from fairfleet.server.handlers import service_handler
from fairfleet.server.http_token import SHORTEST
from fairfleet.server.operators import Operators
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store
from fairfleet.server.tls import CertificateFiles, load_authority

log = logging.getLogger(__name__)

ENROLMENT = enrolment_pb2.DESCRIPTOR.services_by_name["Enrolment"]


def check_transport(settings: ServerSettings) -> None:
    """Before anything else: what is not safe is refused, or said loudly where it was asked for."""
    if settings.pki is None:
        if settings.enrolment is not None:
            raise UsageError("--enrolment gives out certificates, and so needs --pki: a folder of `fairfleet pki init`")
        if not is_loopback(settings.listen):
            if not settings.insecure:
                raise UsageError(
                    f"{settings.listen} can be reached from other machines, and everything would go in the clear. Give "
                    "--pki FOLDER (see `fairfleet pki init`), listen on 127.0.0.1, or say --insecure."
                )
            log.warning(
                "INSECURE: %s takes calls in the clear; whoever reaches it can read everything, join under any name, "
                "and stop the federation",
                settings.listen,
            )
    token = http_token(settings)
    if not is_loopback(f"{settings.http.host}:{settings.http_port}"):
        told = "with a token, which goes in the clear" if token else "to everybody who reaches it (see http.token)"
        log.warning("metrics and page on %s are shown %s", settings.http.host, told)


def http_token(settings: ServerSettings) -> str | None:
    token, file = settings.http.token, settings.http.token_file
    if token is not None and file is not None:
        raise UsageError("give http.token or http.token_file, not both")
    given = token.get_secret_value() if token else None
    if file is not None:
        given = read_private(file, "the token for HTTP").decode(errors="replace").strip()
    if given is not None and (len(given) < SHORTEST or not given.isascii() or not given.isprintable()):
        raise UsageError(
            f"the token for HTTP must have at least {SHORTEST} printable ASCII characters, found {len(given)} "
            "characters; make one with `openssl rand -hex 16`"
        )
    return given


class Guarding:
    def __init__(self, coordinator: Coordinator, store: Store, settings: ServerSettings) -> None:
        self._coordinator = coordinator
        self._pki = settings.pki
        self._listen = settings.enrolment
        authority = load_authority(settings.pki) if settings.pki and settings.enrolment else None
        if settings.enrolment and authority is None:
            log.warning("there is no %s in %s: tokens are refused", CA_KEY, settings.pki)
        self.operators = Operators(store, coordinator.in_database, coordinator.calls)
        self.enrolling = Enrolling(
            store, coordinator.in_database, self._refuse_revoked, authority, self._ca, coordinator.gate
        )
        self.service = service_handler(ENROLMENT, EnrolmentService(self.enrolling), frozenset(), coordinator.gate)
        self._enrolment: grpc.aio.Server | None = None

    def _ca(self) -> bytes:
        """As it is now: it may have been replaced since the start."""
        return (self._pki / CA).read_bytes() if self._pki else b""

    def _count(self, who: Identity) -> None:
        """Every call of a client, right or wrong. Operators are trusted that far; strangers have nothing to call."""
        if who.role is Role.CLIENT:
            try:
                self._coordinator.gate.calls.take(who.name, asyncio.get_running_loop().time())
            except LimitReached as error:
                self._coordinator.gate.refusals.add(error.reason)
                raise

    def _refuse_revoked(self, who: Identity) -> None:
        if who.role is Role.OPERATOR:
            self.operators.refuse_revoked(who.name)
        elif who.role is Role.CLIENT:
            self._coordinator.refuse_revoked(who.name)

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [Authorization(self._coordinator.calls, self._count, self._refuse_revoked)] if self._pki else []

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """For all who have a certificate, or, in the clear, for all."""
        credentials = CertificateFiles(self._pki).credentials(of_members=True) if self._pki else None
        return _bind(server, listen, credentials)

    def bind_enrolment(self) -> None:
        """A server of its own, which has no other service: gRPC cannot ask for a certificate and do without one."""
        if self._pki and self._listen:
            options = (*SERVER_OPTIONS, *enrolment_limits(self._coordinator.settings.limits))
            self._enrolment = grpc.aio.server(options=options, interceptors=self.interceptors)
            self._enrolment.add_generic_rpc_handlers((self.service,))
            credentials = CertificateFiles(self._pki).credentials(of_members=False)
            address = _bind(self._enrolment, self._listen, credentials)
            self.enrolling.port = int(address.rpartition(":")[2])
            log.info("devices with a token are enrolled on %s", address)

    async def start(self) -> None:
        if self._enrolment:
            await self._enrolment.start()

    async def stop(self) -> None:
        if self._enrolment:
            await self._enrolment.stop(None)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    host = listen.rpartition(":")[0]
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise UsageError(
            f"cannot listen on {listen}: the port is in use, or the address is not this machine's. "
            "Stop the other program or give another --listen."
        ) from error
    return f"{host}:{port}"
