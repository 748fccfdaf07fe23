"""The server's end of TLS: its certificate, which may be replaced while it serves, and which peers it lets in at all.

gRPC speaks TLS 1.2 and 1.3 and nothing older. Certificates are looked at again at every new connection, so one that was
renewed is used from then on; connections that are open stay open.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.certificates import Authority, Pair, belong_together, load_certificate
from fairfleet.common.errors import UsageError
from fairfleet.common.pki_folder import CA, CA_KEY, SERVER, SERVER_KEY
from fairfleet.common.private_files import read_private

log = logging.getLogger(__name__)

SOON = timedelta(days=30)

Marks = tuple[tuple[int, int, int], ...]


class CertificateFiles:
    """Those in a folder that `fairfleet pki init` made, or one with files of the same names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # connections are made in threads of gRPC's
        self._marks = self._look()
        self._first = self._read()

    def credentials(self, *, of_members: bool) -> grpc.ServerCredentials:
        """`of_members`: only whoever shows a certificate of the CA gets in."""
        newer: Any = self._newer  # may answer None, which the type of gRPC's stubs forgets
        return grpc.dynamic_ssl_server_credentials(self._first, newer, require_client_authentication=of_members)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked at every new connection; None: nothing has changed. What is not whole yet is looked at again."""
        with self._lock:
            try:
                marks = self._look()
                if marks == self._marks:
                    return None
                found, self._marks = self._read(), marks
            except (UsageError, OSError) as error:
                log.warning("going on with the certificate from before: %s", error)
                return None
        log.info("took up the renewed certificate in %s", self._folder)
        return found

    def _look(self) -> Marks:
        try:
            found = [os.stat(self._folder / name) for name in (CA, SERVER, SERVER_KEY)]
        except OSError as error:
            raise UsageError(
                f"cannot find {error.filename}: {error.strerror}. Make the server's certificate with "
                "`fairfleet pki init`, and give its folder as --pki."
            ) from error
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        key = read_private(self._folder / SERVER_KEY, "the server's private key")
        certificate, ca = ((self._folder / name).read_bytes() for name in (SERVER, CA))
        ends = load_certificate(certificate, f"{self._folder / SERVER}").not_valid_after_utc
        load_certificate(ca, f"{self._folder / CA}")
        if not belong_together(Pair(key, certificate)):
            raise UsageError(f"{self._folder / SERVER_KEY} is not the key of {SERVER} beside it")
        if ends < datetime.now(UTC) + SOON:
            log.warning("the server's certificate ends on %s: renew it with `fairfleet pki renew`", f"{ends:%Y-%m-%d}")
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


def load_authority(folder: Path) -> Authority | None:
    """The CA, where its key is beside the server's: then the server can sign what devices ask for."""
    if not (folder / CA_KEY).exists():
        return None
    key = read_private(folder / CA_KEY, "the CA's private key")
    return Authority.of(Pair(key, (folder / CA).read_bytes()))
