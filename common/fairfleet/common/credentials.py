"""`NAME.fleet`: all that a client or an operator needs to reach a server, in one JSON file.

    {"format": "fairfleet-credentials-1", "address": "fleet.example:8440",
     "ca": "-----BEGIN CERTIFICATE…", "certificate": "-----BEGIN CERTIFICATE…", "key": "-----BEGIN PRIVATE KEY…"}

Identity and validity are read from the certificate itself. The key is secret: so is the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fairfleet.common.errors import UsageError
from fairfleet.common.identity import Identity, Role
from fairfleet.common.private_files import read_private, write_private

FORMAT = "fairfleet-credentials-1"
FIELDS = ("address", "ca", "certificate", "key")


@dataclass(frozen=True)
class Credentials:
    identity: Identity
    ends: datetime
    address: str
    ca: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Credentials({self.identity}, ends {self.ends:%Y-%m-%d}, {self.address})"  # never the key

    @classmethod
    def of(cls, address: str, ca: bytes, certificate: bytes, key: bytes) -> Credentials:
        from fairfleet.common.certificates import certified  # takes a while to import, and loopback does without

        said = certified(certificate)
        return cls(said.identity, said.ends, address, ca, certificate, key)

    def text(self) -> str:
        parts = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        told = {"format": FORMAT, "address": self.address} | {name: part.decode() for name, part in parts.items()}
        return json.dumps(told, indent=1) + "\n"

    def save(self, path: Path) -> None:
        write_private(path, self.text().encode())


def read_credentials(path: Path) -> Credentials:
    """Refuses what cannot work, with the reason: a handshake that fails tells nobody why."""
    from fairfleet.common.certificates import Pair, belong_together, load_certificate

    data = read_private(path, "a private key")
    try:
        told = json.loads(data)
        fields = [told[name] for name in FIELDS]
        if told["format"] != FORMAT or not all(isinstance(field, str) for field in fields):
            raise ValueError
        address, ca, certificate, key = (str(field) for field in fields)
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is damaged, or no file of `fairfleet enroll`: not of format {FORMAT}") from None
    load_certificate(ca.encode(), f"the CA in {path}")
    load_certificate(certificate.encode(), f"the certificate in {path}")
    if not belong_together(Pair(key.encode(), certificate.encode())):
        raise UsageError(f"{path} is damaged: its key is not that of its certificate")
    found = Credentials.of(address, ca.encode(), certificate.encode(), key.encode())
    if found.identity.role is Role.NOBODY:
        raise UsageError(f"{path}: its certificate names neither a client nor an operator")
    return found


def refuse_ended(found: Credentials, path: Path) -> None:
    if found.ends <= datetime.now(UTC):
        raise UsageError(
            f"{path}: the certificate of {found.identity} ended on {found.ends:%Y-%m-%d %H:%M} UTC. Ask the operator "
            "for a new file (`fairfleet renew` there), or for a token."
        )
