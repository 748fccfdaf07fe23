"""`NAME.fleet`: all that a client or an operator needs to reach a server, in one JSON file.

    {"format": "fairfleet-credentials-1", "address": "fleet.example:8440",
     "ca": "-----BEGIN CERTIFICATE…", "certificate": "-----BEGIN CERTIFICATE…", "key": "-----BEGIN PRIVATE KEY…"}

Identity and validity are read from the certificate itself. The key is secret: so is the file. A folder with `ca.crt`,
`tls.crt` and `tls.key`, as cert-manager and Kubernetes' TLS secrets have them, does as well; it names no address.
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
FOLDER_CA, FOLDER_CERTIFICATE, FOLDER_KEY = "ca.crt", "tls.crt", "tls.key"


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

    address, ca, certificate, key = _read_folder(path) if path.is_dir() else _read_file(path)
    load_certificate(ca, f"the CA in {path}")
    load_certificate(certificate, f"the certificate in {path}")
    if not belong_together(Pair(key, certificate)):
        raise UsageError(f"{path} is damaged: its key is not that of its certificate")
    found = Credentials.of(address, ca, certificate, key)
    if found.identity.role is Role.NOBODY:
        raise UsageError(f"{path}: its certificate names neither a client nor an operator")
    return found


def _read_file(path: Path) -> tuple[str, bytes, bytes, bytes]:
    data = read_private(path, "a private key")
    try:
        told = json.loads(data)
        fields = [told[name] for name in FIELDS]
        if told["format"] != FORMAT or not all(isinstance(field, str) for field in fields):
            raise ValueError
        address, ca, certificate, key = (str(field) for field in fields)
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is damaged, or no file of `fairfleet enroll`: not of format {FORMAT}") from None
    return address, ca.encode(), certificate.encode(), key.encode()


def _read_folder(path: Path) -> tuple[str, bytes, bytes, bytes]:
    try:
        ca, certificate = ((path / name).read_bytes() for name in (FOLDER_CA, FOLDER_CERTIFICATE))
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    return "", ca, certificate, read_private(path / FOLDER_KEY, "a private key")


def file_that_changes(path: Path) -> Path:
    """Which file to look at to see whether credentials were renewed."""
    return path / FOLDER_CERTIFICATE if path.is_dir() else path


def refuse_ended(found: Credentials, path: Path) -> None:
    if found.ends <= datetime.now(UTC):
        raise UsageError(
            f"{path}: the certificate of {found.identity} ended on {found.ends:%Y-%m-%d %H:%M} UTC. Ask the operator "
            "for a new file (`fairfleet renew` there), or for a token."
        )
