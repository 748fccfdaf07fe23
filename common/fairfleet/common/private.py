"""Folders and files that are nobody else's business: models, updates and keys lie there."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def tighten(folder: Path) -> None:
    """Takes from others what they may do in a folder of ours; of one that is another's, says that they may.

    A folder that somebody made beforehand, or an older version of this program, may be open to all. A volume that an
    orchestrator mounts belongs to root, and is for the pod alone anyway: there is nothing to take.
    """
    found = folder.stat()
    if not found.st_mode & OTHERS:
        return
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid():
        folder.chmod(mode & ~OTHERS)
        log.warning("%s was open to other users (mode %o); it is ours alone now", folder, mode)
    else:
        log.warning("%s belongs to another user and is open to others (mode %o); use one of your own", folder, mode)
