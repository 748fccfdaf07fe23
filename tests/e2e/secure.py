"""A federation with TLS: its own CA, made a year ago, so that certificates of every age can be made by it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.access import channel_credentials
from fairfleet.common.certificates import Authority, Pair, new_authority
from fairfleet.common.credentials import Credentials
from fairfleet.common.identity import Identity, Role
from fairfleet.common.pki_folder import ADDRESS, CA, CA_KEY, HERE, SERVER, SERVER_KEY
from fairfleet.common.private_files import make_private_folder, write_private
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub
from tests.e2e.device import Device
from tests.e2e.fleet import OWN_CONNECTION, Fleet, free_port

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def client(name: str) -> Identity:
    return Identity(Role.CLIENT, name)


def operator(name: str) -> Identity:
    return Identity(Role.OPERATOR, name)


class SecureFleet(Fleet):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pki = folder / "pki"
        self.enrolment_port = free_port()
        made = new_authority("CA of the tests", now=NOW - 365 * DAY)
        self.authority = Authority.of(made)
        make_private_folder(self.pki)
        for name, content in ((CA_KEY, made.key), (CA, made.certificate), (ADDRESS, self.address.encode())):
            write_private(self.pki / name, content)
        self.ca = made.certificate
        self.give_server(self.authority.server(HERE))

    def give_server(self, pair: Pair) -> None:
        write_private(self.pki / SERVER_KEY, pair.key)
        write_private(self.pki / SERVER, pair.certificate)

    @property
    def enrolment(self) -> str:
        return f"127.0.0.1:{self.enrolment_port}"

    def start_server(self, die_at: int = 0, **settings: Any) -> None:
        super().start_server(die_at, **{"pki": self.pki, "enrolment": self.enrolment, **settings})

    # ---- who -----------------------------------------------------------------------------------

    def credentials(self, who: Identity, ttl: timedelta = 90 * DAY, now: datetime | None = None) -> Credentials:
        pair = self.authority.member(who, ttl, now)
        return Credentials.of(self.address, self.ca, pair.certificate, pair.key)

    @cached_property
    def operators(self) -> Credentials:
        return self.credentials(operator("operator"))

    def bundle(self, who: Identity, **made: Any) -> Path:
        """The file of its credentials; made once."""
        file = self.folder / f"{who.role}-{who.name}.fleet"
        if not file.exists():
            self.credentials(who, **made).save(file)
        return file

    def identity_of(self, name: str) -> list[str]:
        return ["--credentials", str(self.bundle(client(name))), "--server", self.address_for(name)]

    # ---- channels ------------------------------------------------------------------------------

    def channel(self) -> grpc.Channel:
        return self.channel_of(self.operators)

    def channel_of(self, who: Credentials) -> grpc.Channel:
        return self._kept(grpc.secure_channel(self.address, channel_credentials(who), OWN_CONNECTION))

    def device(self, name: str, **made: Any) -> Device:
        return Device(self.address, name, self.channel_of(self.credentials(client(name), **made)))

    def enrolment_channel(self) -> grpc.Channel:
        """Of somebody without a certificate."""
        credentials = grpc.ssl_channel_credentials(self.ca)
        return self._kept(grpc.secure_channel(self.enrolment, credentials, OWN_CONNECTION))

    def stranger(self) -> EnrolmentStub:
        return EnrolmentStub(self.enrolment_channel())

    def _kept(self, channel: grpc.Channel) -> grpc.Channel:
        self._channels.append(channel)
        return channel
