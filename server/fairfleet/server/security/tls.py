"""The server's side of TLS: its certificate, and which peers may connect at all.

gRPC speaks TLS 1.2 and 1.3 only. The certificate files are checked at every new connection, so a
renewed certificate is used from then on; open connections stay open.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.errors import UsageError
from fairfleet.common.pki.certificates import Authority, KeyPair, belong_together, load_certificate
from fairfleet.common.pki.pki_folder import CA, CA_KEY, SERVER, SERVER_KEY
from fairfleet.common.pki.private_files import read_private

log = logging.getLogger(__name__)

SOON = timedelta(days=30)

FileMarks = tuple[tuple[int, int, int], ...]  # modification time, inode and size of each file


class CertificateFiles:
    """The certificate files in a folder of `fairfleet pki init`, or with the same file names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # gRPC opens connections in threads of its own
        self._marks = self._read_marks()
        self._first = self._read()

    def credentials(self, *, of_members: bool) -> grpc.ServerCredentials:
        """Return credentials that follow the files. `of_members` requires a client certificate."""
        newer: Any = self._newer  # It may return None, which the type in gRPC's stubs omits.
        return grpc.dynamic_ssl_server_credentials(
            self._first, newer, require_client_authentication=of_members
        )

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the renewed certificate, or None if nothing has changed.

        gRPC calls this at every new connection. Incomplete files are read again next time.
        """
        with self._lock:
            try:
                marks = self._read_marks()
                if marks == self._marks:
                    return None
                configuration, self._marks = self._read(), marks
            except (UsageError, OSError) as error:
                log.warning("keeping the previous certificate: %s", error)
                return None
        log.info("loaded the renewed certificate in %s", self._folder)
        return configuration

    def _read_marks(self) -> FileMarks:
        try:
            stats = [os.stat(self._folder / name) for name in (CA, SERVER, SERVER_KEY)]
        except OSError as error:
            raise UsageError(
                f"cannot find {error.filename}: {error.strerror}. Create the server's certificate "
                "with `fairfleet pki init`, and pass its folder as --pki."
            ) from error
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        key = read_private(self._folder / SERVER_KEY, "the server's private key")
        certificate, ca = ((self._folder / name).read_bytes() for name in (SERVER, CA))
        ends = load_certificate(certificate, f"{self._folder / SERVER}").not_valid_after_utc
        load_certificate(ca, f"{self._folder / CA}")
        if not belong_together(KeyPair(key, certificate)):
            raise UsageError(f"{self._folder / SERVER_KEY} is not the key of {SERVER} next to it")
        if ends < datetime.now(UTC) + SOON:
            log.warning(
                "the server's certificate expires on %s: renew it with `fairfleet pki renew`",
                f"{ends:%Y-%m-%d}",
            )
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


def load_authority(folder: Path) -> Authority | None:
    """Return the CA if its key is in the folder: then the server can sign certificate requests."""
    if not (folder / CA_KEY).exists():
        return None
    key = read_private(folder / CA_KEY, "the CA's private key")
    return Authority.of(KeyPair(key, (folder / CA).read_bytes()))
