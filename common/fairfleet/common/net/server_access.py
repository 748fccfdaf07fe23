"""How to reach a server: its address, and its credentials unless the channel is unencrypted.

A credentials file may be renewed while a program runs: `renewed` reports it, and the next channel
uses the new file.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.errors import UsageError
from fairfleet.common.net.addresses import check_unencrypted, leads_here
from fairfleet.common.pki.credentials import (
    Credentials,
    file_that_changes,
    read_credentials,
    refuse_expired,
)

log = logging.getLogger(__name__)

Mark = tuple[int, int, int]
# Fragments of gRPC's messages for a failed handshake, and what they mean.
HANDSHAKES = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not of this credential's CA, "
    "or is not valid now",
    "WRONG_VERSION_NUMBER": "the server there does not use TLS",
    "Hostname Verification Check failed": "the server's certificate is for another host name",
}


class ServerAccess:
    """The address of a server, and the credentials to reach it, if any."""

    def __init__(
        self, address: str | None, credentials: Path | None = None, insecure: bool = False
    ) -> None:
        """Read the credentials, which may also give the address.

        Raises UsageError if the address is missing or malformed, the credentials are not usable,
        or an unencrypted channel would leave this machine without `insecure`.
        """
        self.path, self._mark = credentials, _mark(credentials)
        self.credentials = self._read()
        if address is None and self.credentials is None:
            raise UsageError(
                "give the server's address with --server host:port, or --credentials NAME.fleet"
            )
        self.address = address or (self.credentials.address if self.credentials else "")
        if not self.address:
            raise UsageError(
                f"{credentials} does not say where the server is: give --server host:port"
            )
        if not re.fullmatch(r"unix.*|.+:\d{1,5}", self.address):
            raise UsageError(
                f"{self.address!r} is not of the form host:port, for example 127.0.0.1:8440"
            )
        if self.credentials is None:
            self._check_unencrypted(insecure)

    def _check_unencrypted(self, insecure: bool) -> None:
        check_unencrypted(self.address, insecure)
        if not leads_here(self.address):
            log.warning(
                "INSECURE: everything is sent to %s unencrypted, readable on the way", self.address
            )

    def channel(self, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Open a channel to the server."""
        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(
            self.address, channel_credentials(self.credentials), options=options
        )

    def refuse_expired(self) -> None:
        """Raise UsageError if the credentials have expired, because no retry can succeed."""
        if self.credentials is not None and self.path is not None:
            refuse_expired(self.credentials, self.path)

    @property
    def renewed(self) -> bool:
        """Return whether the file changed. If its content is usable, it is loaded."""
        mark = _mark(self.path)
        if mark is None or mark == self._mark:
            return False
        self._mark = mark
        try:
            self.credentials = self._read()
        except UsageError as error:
            log.warning("continuing with the previous credentials: %s", error)
            return False
        log.info(
            "took up the renewed credentials, valid until %s",
            self.credentials and self.credentials.ends,
        )
        return True

    def _read(self) -> Credentials | None:
        if self.path is None:
            return None
        credentials = read_credentials(self.path)
        refuse_expired(credentials, self.path)
        return credentials


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Return the credentials in the form that gRPC needs."""
    return grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)


def handshake_words(details: str, encrypted: bool) -> str:
    """Return the cause of a failed connection in plain words, or "" if gRPC gives no cause.

    >>> handshake_words("… SSL_ERROR_SSL: error:100000f7: WRONG_VERSION_NUMBER: Invalid", True)
    'the server there does not use TLS'
    """
    for fragment, meaning in HANDSHAKES.items():
        if fragment in details:
            return meaning
    if "Socket closed" in details or "Connection reset" in details:
        if encrypted:
            return (
                "the server closed the connection: it does not accept this certificate, "
                "or is stopping"
            )
        return (
            "the server closed the connection: it is stopping, or needs TLS "
            "(then give --credentials)"
        )
    return ""


def _mark(path: Path | None) -> Mark | None:
    if path is None:
        return None
    try:
        status = os.stat(file_that_changes(path))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
