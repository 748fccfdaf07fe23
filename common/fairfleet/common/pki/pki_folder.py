"""The folder that `fairfleet pki init` creates: the CA, the server's certificate and its address.

    ca.crt  ca.key  server.crt  server.key  address        mode 0700, keys 0600

The server reads ca.crt, server.crt and server.key. It needs ca.key only to sign the requests of
devices. This file must never be lost or leak: its owner can impersonate every client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from fairfleet.common.errors import UsageError
from fairfleet.common.pki.certificates import (
    Authority,
    KeyPair,
    checked_name,
    load_certificate,
    new_authority,
)
from fairfleet.common.pki.credentials import Credentials
from fairfleet.common.pki.identity import Identity
from fairfleet.common.pki.private_files import make_private_folder, read_private, write_private

CA, CA_KEY, SERVER, SERVER_KEY, ADDRESS = "ca.crt", "ca.key", "server.crt", "server.key", "address"
PUBLIC_MODE = 0o644
# Names of the server's own machine, for health checks and operators there.
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class PkiFolder:
    """A folder with the files of a CA and its server."""

    path: Path

    def create(
        self, names: Sequence[str], address: str, *, ca_ttl: timedelta, server_ttl: timedelta
    ) -> None:
        """Create a CA and a server certificate for these names.

        Raises UsageError if the folder holds a CA already, or a name is not valid.
        """
        if (self.path / CA).exists() or (self.path / CA_KEY).exists():
            raise UsageError(
                f"{self.path} holds a CA already; a new one would lock out all clients that it "
                "enrolled. Give another --pki, or renew the server's certificate with "
                "`fairfleet pki renew`."
            )
        ca = new_authority(f"FairFleet CA of {names[0]}"[:64], ca_ttl)
        # Sign the server's certificate before writing any file, because a name may not be valid.
        server = Authority.of(ca).server(with_local_names(names), server_ttl)
        make_private_folder(self.path)
        write_private(self.path / CA_KEY, ca.key)
        write_private(self.path / CA, ca.certificate, PUBLIC_MODE)
        write_private(self.path / ADDRESS, address.encode(), PUBLIC_MODE)
        self._write_server(server)

    def renew_server(self, names: Sequence[str], ttl: timedelta) -> list[str]:
        """Write a new server certificate and return its names, by default the previous ones.

        A running server loads it.
        """
        names = with_local_names(names) if names else self.server_names()
        self._write_server(self.authority().server(names, ttl))
        return list(names)

    def _write_server(self, pair: KeyPair) -> None:
        """Write the server's key, then its certificate.

        A server that reads between the two writes sees that they do not match, and waits.
        """
        write_private(self.path / SERVER_KEY, pair.key)
        write_private(self.path / SERVER, pair.certificate, PUBLIC_MODE)

    def server_names(self) -> list[str]:
        """Return the DNS names and IP addresses in the server's certificate."""
        certificate = load_certificate(self._read(SERVER), str(self.path / SERVER))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
        return [*names.get_values_for_type(x509.DNSName), *addresses]

    def authority(self) -> Authority:
        """Return the CA. Raises UsageError if its files are missing, damaged or too open."""
        ca = self._read(CA)
        return Authority.of(KeyPair(read_private(self.path / CA_KEY, "the CA's private key"), ca))

    def address(self) -> str:
        """Return the address at which clients reach the server."""
        return self._read(ADDRESS).decode(errors="replace").strip()

    def enroll(self, identity: Identity, ttl: timedelta, address: str | None) -> Credentials:
        """Return new credentials of an identity, by default with the folder's address."""
        pair = self.authority().member(identity, ttl)
        return Credentials.of(address or self.address(), self._read(CA), pair.certificate, pair.key)

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise UsageError(
                f"cannot read {self.path / name}: {error.strerror}. "
                "Give the folder of `fairfleet pki init` as --pki."
            ) from error


def with_local_names(names: Sequence[str]) -> list[str]:
    """Return the checked names and those of the server's own machine, without repetitions."""
    return list(dict.fromkeys(map(checked_name, (*names, *LOCAL_NAMES))))
