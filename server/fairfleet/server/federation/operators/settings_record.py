"""Records the settings of a federation whenever they change, and the change in the audit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fairfleet.common.errors import short
from fairfleet.server.federation.operators.effective_settings import (
    changed_settings,
    settings_digest,
    settings_json,
)
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.operations.audit_queries import (
    OperatorAction,
    audit_write,
    newest_settings,
    settings_write,
)
from fairfleet.server.storage.store import Store

log = logging.getLogger(__name__)

# Settings of the process rather than of the federation: to change them is usual.
OF_THE_PROCESS = ("listen", "http.", "exit_when_finished", "tensorboard", "enrolment", "limits.")
MAX_CHANGES_CHARS = 400


def record_changed_settings(store: Store, settings: ServerSettings) -> None:
    """Store the settings if they differ from those that were recorded last."""
    before, after = newest_settings(store), settings_json(settings)
    if before == after:
        return
    writes = [settings_write(after, settings_digest(settings))]
    if before is not None:
        changes = changed_settings(before, after)
        _warn(changes, settings)
        action = OperatorAction("", "settings", changes)
        writes.append(audit_write(action))
    store.write(*writes)


def _warn(changes: Mapping[str, tuple[Any, Any]], settings: ServerSettings) -> None:
    """Log which settings of the federation differ from those that it had until now."""
    texts = [
        f"{name} was {json.dumps(old)} and is {json.dumps(new)}"
        for name, (old, new) in changes.items()
        if not name.startswith(OF_THE_PROCESS)
    ]
    if texts:
        log.warning(
            "the federation in %s goes on with other settings: %s. "
            "To begin a new federation instead, give another --state-dir.",
            settings.state_dir,
            short("; ".join(texts), MAX_CHANGES_CHARS),
        )
