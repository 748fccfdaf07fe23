"""A federation with TLS. Its CA is a year old, so it can sign certificates of any age."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.net.server_access import channel_credentials
from fairfleet.common.pki.certificates import Authority, KeyPair, new_authority
from fairfleet.common.pki.credentials import Credentials
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.pki_folder import ADDRESS, CA, CA_KEY, LOCAL_NAMES, SERVER, SERVER_KEY
from fairfleet.common.pki.private_files import make_private_folder, write_private
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub
from tests.support.device import Device
from tests.support.fleet import OWN_CONNECTION, Fleet, free_port

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def client(name: str) -> Identity:
    """Return the identity of a client."""
    return Identity(Role.CLIENT, name)


def operator(name: str) -> Identity:
    """Return the identity of an operator."""
    return Identity(Role.OPERATOR, name)


class SecureFleet(Fleet):
    """A fleet whose members have certificates, and whose server enrolls new ones."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pki = folder / "pki"
        self.enrolment_port = free_port()
        root = new_authority("CA of the tests", now=NOW - 365 * DAY)
        self.authority = Authority.of(root)
        make_private_folder(self.pki)
        for name, content in (
            (CA_KEY, root.key),
            (CA, root.certificate),
            (ADDRESS, self.address.encode()),
        ):
            write_private(self.pki / name, content)
        self.ca = root.certificate
        self.give_server(self.authority.server(LOCAL_NAMES))

    def give_server(self, pair: KeyPair) -> None:
        """Install the certificate of the server."""
        write_private(self.pki / SERVER_KEY, pair.key)
        write_private(self.pki / SERVER, pair.certificate)

    @property
    def enrolment(self) -> str:
        """Where devices are enrolled."""
        return f"127.0.0.1:{self.enrolment_port}"

    def start_server(self, crash_at: int = 0, **settings: Any) -> None:
        """Start the server with TLS and the enrolment port."""
        super().start_server(crash_at, **{"pki": self.pki, "enrolment": self.enrolment, **settings})

    # ---- credentials ---------------------------------------------------------------------------

    def credentials(
        self, who: Identity, ttl: timedelta = 90 * DAY, now: datetime | None = None
    ) -> Credentials:
        """Return new credentials for a member."""
        pair = self.authority.member(who, ttl, now)
        return Credentials.of(self.address, self.ca, pair.certificate, pair.key)

    @cached_property
    def operators(self) -> Credentials:
        """The credentials of the operator."""
        return self.credentials(operator("operator"))

    def credentials_file(self, who: Identity, **root: Any) -> Path:
        """Return the file of a member's credentials, which is written once."""
        file = self.folder / f"{who.role}-{who.name}.fleet"
        if not file.exists():
            self.credentials(who, **root).save(file)
        return file

    def identity_of(self, name: str) -> list[str]:
        return [
            "--credentials",
            str(self.credentials_file(client(name))),
            "--server",
            self.address_for(name),
        ]

    # ---- channels ------------------------------------------------------------------------------

    def channel(self) -> grpc.Channel:
        """Return a channel of the operator."""
        return self.channel_of(self.operators)

    def channel_of(self, who: Credentials) -> grpc.Channel:
        """Return a channel of a member; it is closed with the fleet."""
        return self._closed_at_end(
            grpc.secure_channel(self.address, channel_credentials(who), OWN_CONNECTION)
        )

    def device(self, name: str, **root: Any) -> Device:
        return Device(self.address, name, self.channel_of(self.credentials(client(name), **root)))

    def enrolment_channel(self) -> grpc.Channel:
        """Return a channel without a certificate."""
        credentials = grpc.ssl_channel_credentials(self.ca)
        return self._closed_at_end(grpc.secure_channel(self.enrolment, credentials, OWN_CONNECTION))

    def enrolment_stub(self) -> EnrolmentStub:
        """Return a stub without a certificate, as a new device has it."""
        return EnrolmentStub(self.enrolment_channel())

    def _closed_at_end(self, channel: grpc.Channel) -> grpc.Channel:
        self._channels.append(channel)
        return channel
