"""Records the settings of a federation whenever they change, and the change in the audit."""

from __future__ import annotations

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


def record_changed_settings(store: Store, settings: ServerSettings) -> None:
    """Store the settings if they differ from those that were recorded last."""
    before, after = newest_settings(store), settings_json(settings)
    if before == after:
        return
    writes = [settings_write(after, settings_digest(settings))]
    if before is not None:
        action = OperatorAction("", "settings", changed_settings(before, after))
        writes.append(audit_write(action))
    store.write(*writes)
