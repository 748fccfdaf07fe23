"""Create all credentials of a fleet on one machine, each in its own folder, for init containers.

    ca/         what `fairfleet pki init` makes, with the CA's key: for no other container
    server/     ca.crt, server.crt, server.key
    operator/   operator.fleet
    clients/    one NAME.fleet per client

Missing files are created. Files that expire soon, or differ from what is requested, are replaced.
All others stay unchanged, so this can run before every start, and can be killed at any moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import lock_descriptor

from fairfleet.common.errors import UsageError
from fairfleet.common.pki.certificates import (
    CA_TTL,
    CLIENT_TTL,
    SERVER_TTL,
    KeyPair,
    belong_together,
    load_certificate,
)
from fairfleet.common.pki.credentials import read_credentials
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.pki_folder import (
    ADDRESS,
    CA,
    CA_KEY,
    PUBLIC_MODE,
    SERVER,
    SERVER_KEY,
    PkiFolder,
    with_local_names,
)
from fairfleet.common.pki.private_files import FILE_MODE, make_private_folder, write_private

RENEWAL_DIVISOR = 3  # a certificate is renewed when less than a third of its validity remains
OPERATOR = "operator"


@dataclass(frozen=True)
class ProvisionedFleet:
    """The credentials that a fleet needs, and the folder for them."""

    folder: Path
    names: Sequence[str]  # DNS names and IP addresses of the server
    address: str  # where clients reach the server
    operator_address: str  # where operators reach the server
    clients: Sequence[str]
    _written: list[str] = field(default_factory=list)

    def provision(self) -> list[str]:
        """Create what is missing or outdated, and return what was written."""
        with_local_names(self.names)  # refuse a wrong name before anything is written
        with _alone_in(self._folder("ca")):
            self._authority()
            self._server()
            self._member(
                Identity(Role.OPERATOR, OPERATOR), self.operator_address, self._folder("operator")
            )
            folder = self._folder("clients")
            for name in self.clients:
                self._member(Identity(Role.CLIENT, name), self.address, folder)
        return self._written

    @property
    def _pki(self) -> PkiFolder:
        return PkiFolder(self.folder / "ca")

    def _authority(self) -> None:
        path = self._pki.path
        if not (path / CA).exists():
            if (self.folder / "server" / CA).exists():
                raise UsageError(
                    f"{path / CA} is missing, but {self.folder / 'server'} is of that CA: put a "
                    f"copy of the {CA} there back, or remove all folders to begin anew, with all "
                    "clients enrolled again"
                )
            # A key without certificate is from a run that was killed: it has signed nothing.
            (path / CA_KEY).unlink(missing_ok=True)
            self._pki.create(self.names, self.address, ca_ttl=CA_TTL, server_ttl=SERVER_TTL)
            self._written.append("CA")
        elif not (path / ADDRESS).exists() or self._pki.address() != self.address:
            write_private(path / ADDRESS, self.address.encode(), PUBLIC_MODE)

    def _server(self) -> None:
        if not self._server_is_good():
            self._pki.renew_server(self.names, SERVER_TTL)
        folder = self._folder("server")
        # Write the key first: a server that reads between the two writes sees that they do not
        # match, and waits.
        for name, mode in ((SERVER_KEY, FILE_MODE), (SERVER, PUBLIC_MODE), (CA, PUBLIC_MODE)):
            content = (self._pki.path / name).read_bytes()
            if not (folder / name).exists() or (folder / name).read_bytes() != content:
                write_private(folder / name, content, mode)
                self._written.append(f"server/{name}")

    def _server_is_good(self) -> bool:
        path = self._pki.path
        if not (path / SERVER).exists() or not (path / SERVER_KEY).exists():
            return False
        pair = KeyPair((path / SERVER_KEY).read_bytes(), (path / SERVER).read_bytes())
        if not belong_together(pair) or set(self._pki.server_names()) != set(
            with_local_names(self.names)
        ):
            return False
        return not _expires_soon(
            load_certificate(pair.certificate, str(path / SERVER)).not_valid_after_utc, SERVER_TTL
        )

    def _member(self, identity: Identity, address: str, folder: Path) -> None:
        file = folder / f"{identity.name}.fleet"
        if not self._member_is_good(file, address):
            self._pki.enroll(identity, CLIENT_TTL, address).save(file)
            self._written.append(f"{folder.name}/{file.name}")

    def _member_is_good(self, file: Path, address: str) -> bool:
        if not file.exists():
            return False
        try:
            credentials = read_credentials(file)
        except UsageError:
            return False
        ca = (self._pki.path / CA).read_bytes()
        return (
            credentials.address == address
            and credentials.ca == ca
            and not _expires_soon(credentials.ends, CLIENT_TTL)
        )

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        make_private_folder(folder)
        return folder


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder. Two processes at once would make two CAs with mixed files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_descriptor(descriptor)
        yield
    finally:
        os.close(descriptor)


def _expires_soon(ends: datetime, ttl: timedelta) -> bool:
    return ends - datetime.now(UTC) < ttl / RENEWAL_DIVISOR
