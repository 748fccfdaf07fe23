"""A client renews its own certificate in the last third of its time, where the server signs and the file is its own.

Nothing here fails: who cannot renew goes on with what it has, and says so. The new file is taken up like any other
(`Access.renewed`).
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fairfleet.common.access import Access
from fairfleet.common.errors import FleetError

log = logging.getLogger(__name__)

SHARE = 1 / 3  # of its time, at the end: a device that is off for weeks has still some left
PAUSE = timedelta(minutes=10)  # after a try in vain


class Renewal:
    def __init__(self, access: Access) -> None:
        self._access = access
        self._not_before = datetime.min.replace(tzinfo=UTC)

    def attend(self) -> None:
        """Between two tasks: renews if it is time."""
        path, present, now = self._access.path, self._access.credentials, datetime.now(UTC)
        if present is None or path is None or now < self._not_before or not _is_ours(path):
            return
        from fairfleet.client.enrolling import renew  # needs cryptography, which loopback does without
        from fairfleet.common.certificates import certified

        said = certified(present.certificate)
        due = said.ends - SHARE * (said.ends - said.begins)
        if now < due:
            self._not_before = min(due, now + PAUSE)  # the file may be replaced by another meanwhile
            return
        self._not_before = now + min(PAUSE, (said.ends - now) / 4)
        try:
            made = renew(path, self._access.address)
            made.save(path)
        except FleetError as error:
            log.warning("the certificate ends on %s UTC and is not renewed: %s", f"{said.ends:%Y-%m-%d %H:%M}", error)
            return
        log.info("renewed the certificate of %s, valid until %s UTC", made.identity, f"{made.ends:%Y-%m-%d %H:%M}")


def _is_ours(path: Path) -> bool:
    """A file that we may replace. A folder, or what is mounted read-only, is renewed by whoever put it there."""
    return path.is_file() and os.access(path.parent, os.W_OK)
