"""The folder that `fairfleet pki init` makes: the CA, the server's certificate, and where the server is.

    ca.crt  ca.key  server.crt  server.key  address        mode 0700, keys 0600

The server reads ca.crt, server.crt and server.key; ca.key only if it is to sign what devices ask for. It is the one
file that must never be lost or leak: whoever has it is everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from fairfleet.common.certificates import Authority, Pair, checked_name, load_certificate, new_authority
from fairfleet.common.credentials import Credentials
from fairfleet.common.errors import UsageError
from fairfleet.common.identity import Identity
from fairfleet.common.private_files import make_private_folder, read_private, write_private

CA, CA_KEY, SERVER, SERVER_KEY, ADDRESS = "ca.crt", "ca.key", "server.crt", "server.key", "address"
PUBLIC_MODE = 0o644
HERE = ("localhost", "127.0.0.1", "::1")  # the server's own machine: for health checks and operators there


@dataclass(frozen=True)
class PkiFolder:
    path: Path

    def create(self, names: Sequence[str], address: str, *, ca_ttl: timedelta, server_ttl: timedelta) -> None:
        if (self.path / CA).exists() or (self.path / CA_KEY).exists():
            raise UsageError(
                f"{self.path} holds a CA already; a new one would shut everybody out who was enrolled by it. Give "
                "another --pki, or renew the server's certificate with `fairfleet pki renew`."
            )
        made = new_authority(f"FairFleet CA of {names[0]}"[:64], ca_ttl)
        server = Authority.of(made).server(
            with_here(names), server_ttl
        )  # before anything is written: names may be wrong
        make_private_folder(self.path)
        write_private(self.path / CA_KEY, made.key)
        write_private(self.path / CA, made.certificate, PUBLIC_MODE)
        write_private(self.path / ADDRESS, address.encode(), PUBLIC_MODE)
        self._write_server(server)

    def renew_server(self, names: Sequence[str], ttl: timedelta) -> list[str]:
        """A new certificate for the server, for the same names if none are given; a running server takes it up."""
        names = with_here(names) if names else self.server_names()
        self._write_server(self.authority().server(names, ttl))
        return list(names)

    def _write_server(self, pair: Pair) -> None:
        """The key first: whoever reads between the two finds that they do not belong together, and waits."""
        write_private(self.path / SERVER_KEY, pair.key)
        write_private(self.path / SERVER, pair.certificate, PUBLIC_MODE)

    def server_names(self) -> list[str]:
        certificate = load_certificate(self._read(SERVER), str(self.path / SERVER))
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = [str(ip) for ip in found.get_values_for_type(x509.IPAddress)]
        return [*found.get_values_for_type(x509.DNSName), *addresses]

    def authority(self) -> Authority:
        ca = self._read(CA)
        return Authority.of(Pair(read_private(self.path / CA_KEY, "the CA's private key"), ca))

    def address(self) -> str:
        return self._read(ADDRESS).decode(errors="replace").strip()

    def enroll(self, identity: Identity, ttl: timedelta, address: str | None) -> Credentials:
        pair = self.authority().member(identity, ttl)
        return Credentials.of(address or self.address(), self._read(CA), pair.certificate, pair.key)

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise UsageError(
                f"cannot read {self.path / name}: {error.strerror}. Give the folder of `fairfleet pki init` as --pki."
            ) from error


def with_here(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(checked_name, (*names, *HERE))))
