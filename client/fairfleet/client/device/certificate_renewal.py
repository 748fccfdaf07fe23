"""Renewal of a client's own certificate, in the last third of its lifetime.

It needs a server that signs certificates and a credentials file that the client may replace.
Nothing here fails: a client that cannot renew continues with its present certificate and logs the
reason. The connection picks up the new file like any other change (`ServerAccess.renewed`).
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fairfleet.common.errors import FleetError
from fairfleet.common.net.server_access import ServerAccess

log = logging.getLogger(__name__)

SHARE = 1 / 3  # of the lifetime, at its end: a device that is off for weeks still has time left
PAUSE = timedelta(minutes=10)  # after an attempt that failed


class Renewal:
    """Decides when to renew the certificate, and does so."""

    def __init__(self, access: ServerAccess) -> None:
        self._access = access
        self._not_before = datetime.min.replace(tzinfo=UTC)

    def renew_if_due(self) -> None:
        """Renew the certificate if the time has come. To be called between two tasks."""
        path, present, now = self._access.path, self._access.credentials, datetime.now(UTC)
        if present is None or path is None or now < self._not_before or not _may_replace(path):
            return
        # Imported late: this needs cryptography, which a client on loopback does without.
        from fairfleet.common.pki.certificates import certified

        certificate = certified(present.certificate)
        due = certificate.ends - SHARE * (certificate.ends - certificate.begins)
        if now < due:
            # Check again soon all the same: the file may be replaced by a shorter-lived one.
            self._not_before = min(due, now + PAUSE)
            return
        self._not_before = now + min(PAUSE, (certificate.ends - now) / 4)
        self._renew(path, certificate.ends)

    def _renew(self, path: Path, ends: datetime) -> None:
        from fairfleet.client.device.enrolment import renew

        try:
            credentials = renew(path, self._access.address)
            credentials.save(path)
        except FleetError as error:
            log.warning(
                "the certificate expires on %s UTC and is not renewed: %s",
                f"{ends:%Y-%m-%d %H:%M}",
                error,
            )
            return
        log.info(
            "renewed the certificate of %s, valid until %s UTC",
            credentials.identity,
            f"{credentials.ends:%Y-%m-%d %H:%M}",
        )


def _may_replace(path: Path) -> bool:
    """Return whether this is a file that we may replace.

    A folder, or a file in a read-only mount, is renewed by the system that provides it.
    """
    return path.is_file() and os.access(path.parent, os.W_OK)
