"""All credentials of a whole fleet on one machine, each in the folder of whoever needs it: for init containers.

    ca/         what `fairfleet pki init` makes, with the CA's key: nobody else's business
    server/     ca.crt, server.crt, server.key
    operator/   operator.fleet
    clients/    one NAME.fleet per client

Whatever is missing is made, whatever ends soon or says something else than is asked for is made anew, and the rest is
left alone: it can run before every start, and die at any instant.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fairfleet.common.certificates import CA_TTL, CLIENT_TTL, SERVER_TTL, Pair, belong_together, load_certificate
from fairfleet.common.credentials import read_credentials
from fairfleet.common.errors import UsageError
from fairfleet.common.identity import Identity, Role
from fairfleet.common.pki_folder import ADDRESS, CA, CA_KEY, PUBLIC_MODE, SERVER, SERVER_KEY, PkiFolder, with_here
from fairfleet.common.private_files import FILE_MODE, make_private_folder, write_private

LEFT = 3  # a certificate is renewed when less than this part of its time, a third, is left
OPERATOR = "operator"


@dataclass(frozen=True)
class Fleet:
    folder: Path
    names: Sequence[str]  # what the server is called by
    address: str  # where clients reach it
    operator_address: str  # where operators do
    clients: Sequence[str]
    made: list[str] = field(default_factory=list)

    def provision(self) -> list[str]:
        """What was made, or made anew."""
        with_here(self.names)  # refused before anything is made
        with _alone_in(self._folder("ca")):
            self._authority()
            self._server()
            self._member(Identity(Role.OPERATOR, OPERATOR), self.operator_address, self._folder("operator"))
            folder = self._folder("clients")
            for name in self.clients:
                self._member(Identity(Role.CLIENT, name), self.address, folder)
        return self.made

    @property
    def _pki(self) -> PkiFolder:
        return PkiFolder(self.folder / "ca")

    def _authority(self) -> None:
        path = self._pki.path
        if not (path / CA).exists():
            if (self.folder / "server" / CA).exists():
                raise UsageError(
                    f"{path / CA} is missing, but {self.folder / 'server'} is of that CA: put a copy of the {CA} there "
                    "back, or remove all folders to begin anew, with everybody enrolled again"
                )
            (path / CA_KEY).unlink(missing_ok=True)  # of an attempt that died: nobody has its certificate
            self._pki.create(self.names, self.address, ca_ttl=CA_TTL, server_ttl=SERVER_TTL)
            self.made.append("CA")
        elif not (path / ADDRESS).exists() or self._pki.address() != self.address:
            write_private(path / ADDRESS, self.address.encode(), PUBLIC_MODE)

    def _server(self) -> None:
        if not self._server_is_good():
            self._pki.renew_server(self.names, SERVER_TTL)
        folder = self._folder("server")
        # the key first, as where they are made: whoever reads between the two finds that they do not belong together
        for name, mode in ((SERVER_KEY, FILE_MODE), (SERVER, PUBLIC_MODE), (CA, PUBLIC_MODE)):
            content = (self._pki.path / name).read_bytes()
            if not (folder / name).exists() or (folder / name).read_bytes() != content:
                write_private(folder / name, content, mode)
                self.made.append(f"server/{name}")

    def _server_is_good(self) -> bool:
        path = self._pki.path
        if not (path / SERVER).exists() or not (path / SERVER_KEY).exists():
            return False
        pair = Pair((path / SERVER_KEY).read_bytes(), (path / SERVER).read_bytes())
        if not belong_together(pair) or set(self._pki.server_names()) != set(with_here(self.names)):
            return False
        return not _soon(load_certificate(pair.certificate, str(path / SERVER)).not_valid_after_utc, SERVER_TTL)

    def _member(self, who: Identity, address: str, folder: Path) -> None:
        file = folder / f"{who.name}.fleet"
        if not self._member_is_good(file, address):
            self._pki.enroll(who, CLIENT_TTL, address).save(file)
            self.made.append(f"{folder.name}/{file.name}")

    def _member_is_good(self, file: Path, address: str) -> bool:
        if not file.exists():
            return False
        try:
            found = read_credentials(file)
        except UsageError:
            return False
        ca = (self._pki.path / CA).read_bytes()
        return found.address == address and found.ca == ca and not _soon(found.ends, CLIENT_TTL)

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        make_private_folder(folder)
        return folder


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Others wait: two at once would make two CAs, each with half of the other's files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _soon(ends: datetime, ttl: timedelta) -> bool:
    return ends - datetime.now(UTC) < ttl / LEFT
