"""Read and write `NAME.fleet`: all that a client or an operator needs to reach a server.

    {"format": "fairfleet-credentials-1", "address": "fleet.example:8440",
     "ca": "-----BEGIN CERTIFICATE…", "certificate": "-----BEGIN CERTIFICATE…",
     "key": "-----BEGIN PRIVATE KEY…"}

Identity and validity are read from the certificate itself. The key is secret, and so is the file.
A folder with `ca.crt`, `tls.crt` and `tls.key`, the names of cert-manager and Kubernetes' TLS
secrets, works as well; it contains no address.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fairfleet.common.errors import UsageError
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.private_files import read_private, write_private

FORMAT = "fairfleet-credentials-1"
FIELDS = ("address", "ca", "certificate", "key")
FOLDER_CA, FOLDER_CERTIFICATE, FOLDER_KEY = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True)
class Credentials:
    """A certificate with its key, the CA's certificate, and the address of the server."""

    identity: Identity
    ends: datetime
    address: str
    ca: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        # The key must never appear in a log.
        return f"Credentials({self.identity}, ends {self.ends:%Y-%m-%d}, {self.address})"

    @classmethod
    def of(cls, address: str, ca: bytes, certificate: bytes, key: bytes) -> Credentials:
        """Return credentials whose identity and end are those of the PEM certificate."""
        # This import is slow, and programs on loopback do not need it.
        from fairfleet.common.pki.certificates import certified

        info = certified(certificate)
        return cls(info.identity, info.ends, address, ca, certificate, key)

    def text(self) -> str:
        """Return the content of the credentials file."""
        parts = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        fields = {"format": FORMAT, "address": self.address} | {
            name: part.decode() for name, part in parts.items()
        }
        return json.dumps(fields, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write the credentials file, readable only by its owner."""
        write_private(path, self.text().encode())


def read_credentials(path: Path) -> Credentials:
    """Return the credentials of a file or folder.

    Raises UsageError with the reason if they cannot work, because a failed handshake gives none.
    """
    from fairfleet.common.pki.certificates import KeyPair, belong_together, load_certificate

    address, ca, certificate, key = _read_folder(path) if path.is_dir() else _read_file(path)
    load_certificate(ca, f"the CA in {path}")
    load_certificate(certificate, f"the certificate in {path}")
    if not belong_together(KeyPair(key, certificate)):
        raise UsageError(f"{path} is damaged: its key is not that of its certificate")
    credentials = Credentials.of(address, ca, certificate, key)
    if credentials.identity.role is Role.NOBODY:
        raise UsageError(f"{path}: its certificate names neither a client nor an operator")
    return credentials


def _read_file(path: Path) -> tuple[str, bytes, bytes, bytes]:
    data = read_private(path, "a private key")
    try:
        content = json.loads(data)
        fields = [content[name] for name in FIELDS]
        if content["format"] != FORMAT or not all(isinstance(field, str) for field in fields):
            raise ValueError
        address, ca, certificate, key = (str(field) for field in fields)
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{path} is damaged, or not a file of `fairfleet enroll`: not of format {FORMAT}"
        ) from None
    return address, ca.encode(), certificate.encode(), key.encode()


def _read_folder(path: Path) -> tuple[str, bytes, bytes, bytes]:
    try:
        ca, certificate = ((path / name).read_bytes() for name in (FOLDER_CA, FOLDER_CERTIFICATE))
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    return "", ca, certificate, read_private(path / FOLDER_KEY, "a private key")


def file_that_changes(path: Path) -> Path:
    """Return the file whose change shows that the credentials were renewed."""
    return path / FOLDER_CERTIFICATE if path.is_dir() else path


def refuse_expired(credentials: Credentials, path: Path) -> None:
    """Raise UsageError if the certificate has expired."""
    if credentials.ends <= datetime.now(UTC):
        raise UsageError(
            f"{path}: the certificate of {credentials.identity} expired on "
            f"{credentials.ends:%Y-%m-%d %H:%M} UTC. Request a new file from the operator "
            "(made there by `fairfleet renew`), or a token."
        )
