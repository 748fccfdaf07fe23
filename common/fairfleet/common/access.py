"""How a server is reached: its address, and in the clear or with which credentials.

A credentials file may be renewed while a program runs: `renewed` says so, and the next channel uses it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.addresses import check_clear, leads_here
from fairfleet.common.credentials import Credentials, file_that_changes, read_credentials, refuse_ended
from fairfleet.common.errors import UsageError

log = logging.getLogger(__name__)

Mark = tuple[int, int, int]
# What gRPC says of a handshake that failed, and what that means to people.
HANDSHAKES = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not of this credential's CA, or is not valid now",
    "WRONG_VERSION_NUMBER": "the server there speaks clear text, not TLS",
    "Hostname Verification Check failed": "the server's certificate is for another host name",
}


class Access:
    def __init__(self, address: str | None, credentials: Path | None = None, insecure: bool = False) -> None:
        """The address may be left to the credentials."""
        self.path, self._mark = credentials, _mark(credentials)
        self.credentials = self._read()
        if address is None and self.credentials is None:
            raise UsageError("give the server's address with --server host:port, or --credentials NAME.fleet")
        self.address = address or (self.credentials.address if self.credentials else "")
        if not self.address:
            raise UsageError(f"{credentials} does not say where the server is: give --server host:port")
        if not re.fullmatch(r"unix.*|.+:\d{1,5}", self.address):
            raise UsageError(f"{self.address!r} is not of the form host:port, for example 127.0.0.1:8440")
        if self.credentials is None:
            check_clear(self.address, insecure)
            if not leads_here(self.address):
                log.warning("INSECURE: everything goes to %s in the clear, for all on the way to read", self.address)

    def channel(self, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, channel_credentials(self.credentials), options=options)

    def refuse_ended(self) -> None:
        """Credentials that have ended meanwhile open no connection any more: to try again would be in vain."""
        if self.credentials is not None and self.path is not None:
            refuse_ended(self.credentials, self.path)

    @property
    def renewed(self) -> bool:
        """Whether the file holds something else by now; takes it up, if it is any good."""
        mark = _mark(self.path)
        if mark is None or mark == self._mark:
            return False
        self._mark = mark
        try:
            self.credentials = self._read()
        except UsageError as error:
            log.warning("going on with the credentials from before: %s", error)
            return False
        log.info("took up the renewed credentials, valid until %s", self.credentials and self.credentials.ends)
        return True

    def _read(self) -> Credentials | None:
        if self.path is None:
            return None
        found = read_credentials(self.path)
        refuse_ended(found, self.path)
        return found


def channel_credentials(found: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(found.ca, found.key, found.certificate)


def handshake_words(details: str, encrypted: bool) -> str:
    """What to tell a person of a connection that never came about; nothing where it just did not.

    >>> handshake_words("… SSL_ERROR_SSL: error:100000f7: WRONG_VERSION_NUMBER: Invalid", True)
    'the server there speaks clear text, not TLS'
    """
    for sign, words in HANDSHAKES.items():
        if sign in details:
            return words
    if "Socket closed" in details or "Connection reset" in details:
        if encrypted:
            return "the server closed the connection: it does not accept this certificate, or is stopping"
        return "the server closed the connection: it is stopping, or wants TLS (then give --credentials)"
    return ""


def _mark(path: Path | None) -> Mark | None:
    if path is None:
        return None
    try:
        found = os.stat(file_that_changes(path))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
