"""The server's ports: TLS or no encryption, the check of every call, and the port for enrolment.

Without TLS the server listens on this machine only, unless `insecure` is set. Nobody's identity
is checked then.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from fairfleet.common.errors import LimitReached, UsageError
from fairfleet.common.net.addresses import is_loopback
from fairfleet.common.net.channel_options import SERVER_OPTIONS
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.pki_folder import CA, CA_KEY
from fairfleet.proto.v1 import enrolment_pb2
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.rpc.authorization import Authorization
from fairfleet.server.rpc.channel_options import enrolment_limits
from fairfleet.server.rpc.enrolment_service import EnrolmentService
from fairfleet.server.rpc.handlers import service_handler
from fairfleet.server.security.enrolment import EnrolmentAuthority
from fairfleet.server.security.operator_revocation import Operators
from fairfleet.server.security.tls import CertificateFiles, load_authority
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.store import Store

log = logging.getLogger(__name__)

ENROLMENT = enrolment_pb2.DESCRIPTOR.services_by_name["Enrolment"]


def check_transport(settings: ServerSettings) -> None:
    """Raise UsageError for settings that are not safe; log a warning if they are intended."""
    if settings.pki is not None:
        CertificateFiles(settings.pki).credentials(of_members=True)  # they can be read
        return
    if settings.enrolment is not None:
        raise UsageError(
            "--enrolment issues certificates, so it needs --pki: a folder of `fairfleet pki init`"
        )
    if is_loopback(settings.listen):
        return
    if not settings.insecure:
        raise UsageError(
            f"{settings.listen} can be reached from other machines, and everything would be sent "
            "unencrypted. Give --pki FOLDER (see `fairfleet pki init`), listen on 127.0.0.1, or "
            "give --insecure."
        )
    log.warning(
        "INSECURE: %s accepts unencrypted calls; whoever reaches it can read everything, join "
        "under any name, and stop the federation",
        settings.listen,
    )


class Endpoints:
    """The main port, and the port where devices without a certificate enroll."""

    def __init__(self, coordinator: Coordinator, store: Store, settings: ServerSettings) -> None:
        self._coordinator = coordinator
        self._pki = settings.pki
        self._enrolment_address = settings.enrolment
        authority = load_authority(settings.pki) if settings.pki and settings.enrolment else None
        if settings.enrolment and authority is None:
            log.warning("%s has no %s: tokens are refused", settings.pki, CA_KEY)
        self.operators = Operators(store, coordinator.in_database, coordinator.calls)
        self.enrolment_authority = EnrolmentAuthority(
            store,
            coordinator.in_database,
            self._refuse_revoked,
            authority,
            self._ca,
            coordinator.request_limits,
        )
        self.service = service_handler(
            ENROLMENT,
            EnrolmentService(self.enrolment_authority),
            frozenset(),
            coordinator.request_limits,
        )
        self._enrolment_server: grpc.aio.Server | None = None

    def _ca(self) -> bytes:
        """Return the CA certificate, which may have been replaced since the start."""
        return (self._pki / CA).read_bytes() if self._pki else b""

    def _count(self, who: Identity) -> None:
        """Count every call of a client, valid or not.

        Operators are trusted, and a peer without a certificate has no method to call.
        """
        if who.role is not Role.CLIENT:
            return
        limits = self._coordinator.request_limits
        try:
            limits.calls.take(who.name, asyncio.get_running_loop().time())
        except LimitReached as error:
            limits.refusals.add(error.reason)
            raise

    def _refuse_revoked(self, who: Identity) -> None:
        if who.role is Role.OPERATOR:
            self.operators.refuse_revoked(who.name)
        elif who.role is Role.CLIENT:
            self._coordinator.clients.refuse_revoked(who.name)

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """The interceptors of both ports."""
        if self._pki is None:
            return []
        return [Authorization(self._coordinator.calls, self._count, self._refuse_revoked)]

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Add the main port to a server and return its address.

        With TLS a peer needs a certificate. Raises UsageError if the address cannot be used.
        """
        if self._pki is None:
            return _bind(server, listen, None)
        return _bind(server, listen, CertificateFiles(self._pki).credentials(of_members=True))

    def bind_enrolment(self) -> None:
        """Create the server of the enrolment port, if the settings have one.

        It has no other service: one gRPC port cannot both require a certificate and do without.
        """
        if not (self._pki and self._enrolment_address):
            return
        options = (*SERVER_OPTIONS, *enrolment_limits(self._coordinator.settings.limits))
        server = grpc.aio.server(options=options, interceptors=self.interceptors)
        server.add_generic_rpc_handlers((self.service,))
        credentials = CertificateFiles(self._pki).credentials(of_members=False)
        address = _bind(server, self._enrolment_address, credentials)
        self.enrolment_authority.port = int(address.rpartition(":")[2])
        self._enrolment_server = server
        log.info("devices with a token can enroll on %s", address)

    async def start(self) -> None:
        """Start the enrolment port."""
        if self._enrolment_server:
            await self._enrolment_server.start()

    async def stop(self) -> None:
        """Close the enrolment port at once."""
        if self._enrolment_server:
            await self._enrolment_server.stop(None)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    host = listen.rpartition(":")[0]
    try:
        port = (
            server.add_secure_port(listen, credentials)
            if credentials
            else server.add_insecure_port(listen)
        )
    except RuntimeError as error:
        raise UsageError(
            f"cannot listen on {listen}: the port is in use, or the address is not this machine's. "
            "Stop the other program or give another --listen."
        ) from error
    return f"{host}:{port}"
