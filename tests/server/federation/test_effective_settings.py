"""The settings in force, as JSON and as a digest."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from pydantic import SecretStr

from fairfleet.server.federation.operators.effective_settings import (
    changed_settings,
    settings_digest,
    settings_json,
)
from fairfleet.server.federation.operators.settings_record import record_changed_settings
from fairfleet.server.settings import (
    HttpSettings,
    RoundSettings,
    ServerEvaluationSettings,
    ServerSettings,
)
from fairfleet.server.storage.operations.audit_queries import (
    MAX_ARGUMENTS_CHARS,
    OperatorAction,
    arguments_json,
    audit_entries,
    audit_write,
)
from fairfleet.server.storage.store import Store

SECRET = "hunter2"


def test_no_secret_is_in_the_settings_and_the_digest_is_that_of_the_json() -> None:
    settings = ServerSettings(
        database=f"postgresql+psycopg://ann:{SECRET}@db/fleet?sslpassword={SECRET}",
        http=HttpSettings(token=SecretStr(SECRET)),
        evaluation=ServerEvaluationSettings(
            task="a:b",
            options={"db_password": SECRET, "source": f"mysql://ann:{SECRET}@db/x", "folder": "/y"},
        ),
    )
    text = settings_json(settings)
    assert SECRET not in text
    assert "ann" in text
    assert "db/fleet" in text
    assert '"folder":"/y"' in text
    assert settings_digest(settings) == sha256(text.encode()).digest()


def test_a_database_url_that_cannot_be_read_is_masked_as_a_whole() -> None:
    assert json.loads(settings_json(ServerSettings(database=SECRET)))["database"] == "***"


def test_the_digest_depends_on_the_values_and_not_on_the_secrets() -> None:
    plain = ServerSettings(rounds=7)
    assert settings_digest(plain) == settings_digest(ServerSettings(rounds=7))
    assert settings_digest(plain) != settings_digest(ServerSettings(rounds=8))
    first, second = (ServerSettings(http=HttpSettings(token=SecretStr(t))) for t in ("a", "b"))
    assert settings_digest(first) == settings_digest(second)
    assert settings_digest(first) != settings_digest(ServerSettings())


def test_changes_are_listed_by_dotted_name() -> None:
    before = settings_json(ServerSettings())
    after = settings_json(ServerSettings(rounds=7, round=RoundSettings(clients=3)))
    assert changed_settings(before, after) == {"round.clients": (0, 3), "rounds": (100, 7)}


def test_settings_are_recorded_once_and_a_change_is_in_the_audit(tmp_path: Path) -> None:
    with_store = Store(tmp_path / "state")
    try:
        for rounds in (7, 7, 8):
            record_changed_settings(with_store, ServerSettings(rounds=rounds))
        (entry,) = audit_entries(with_store, 0, 10)
        assert (entry.sequence, entry.operator, entry.action) == (1, "", "settings")
        assert json.loads(entry.arguments_json) == {"rounds": [7, 8]}
    finally:
        with_store.close()


def test_what_the_audit_stores_of_an_action_has_a_limit(tmp_path: Path) -> None:
    arguments = {f"name{number}": "x" * 10**6 for number in range(1000)}
    assert len(arguments_json(arguments)) < 2 * MAX_ARGUMENTS_CHARS
    assert json.loads(arguments_json(arguments))["…"] > 900
    store = Store(tmp_path / "state")
    try:
        store.write(audit_write(OperatorAction("o" * 10**6, "stop", arguments), "no" * 10**6))
        (entry,) = audit_entries(store, 0, 10)
        assert len(entry.operator) < 200
        assert len(entry.result) < 400
    finally:
        store.close()


def test_a_sequence_number_above_the_databases_largest_integer_has_no_entries(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "state")
    try:
        store.write(audit_write(OperatorAction("night-shift", "pause", {}), ""))
        assert len(audit_entries(store, 0, 10)) == 1
        assert audit_entries(store, 2**63 - 1, 10) == audit_entries(store, 2**64 - 1, 10) == []
    finally:
        store.close()
