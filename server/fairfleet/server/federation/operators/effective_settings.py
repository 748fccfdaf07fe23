"""The settings in force, without secrets: as JSON, as a digest, and as a list of changes.

The JSON is canonical: equal settings give equal bytes, whatever the order of the file. A password
or token is replaced by a mask, so the digest says that there is one, but not which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from fairfleet.server.settings import ServerSettings

MASK = "***"
SECRET_WORDS = ("password", "passfile", "sslkey", "secret", "token")  # in names of options

Change = tuple[Any, Any]  # the value before and after; None if there was none


def settings_json(settings: ServerSettings) -> str:
    """Return the settings as canonical JSON, with secrets masked.

    The initial model is left out: only the first start of a federation uses it.
    """
    values = settings.model_dump(mode="json", exclude={"model"})
    if values["database"] is not None:
        values["database"] = _masked_url(values["database"])
    if settings.evaluation:
        options = values["evaluation"]["options"]
        values["evaluation"]["options"] = {name: _masked(name, options[name]) for name in options}
    if settings.http.token is not None:
        values["http"]["token"] = MASK
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def settings_digest(settings: ServerSettings) -> bytes:
    """Return the SHA-256 of the settings as canonical JSON."""
    return sha256(settings_json(settings).encode()).digest()


def changed_settings(before: str, after: str) -> dict[str, Change]:
    """Return what differs between two settings as JSON, by dotted name.

    >>> changed_settings('{"round": {"clients": 0, "quorum": 0.8}}', '{"round": {"clients": 9}}')
    {'round.clients': (0, 9), 'round.quorum': (0.8, None)}
    """
    old, new = _flat(json.loads(before)), _flat(json.loads(after))
    names = sorted(old.keys() | new.keys())
    changes = {name: (old.get(name), new.get(name)) for name in names}
    return {name: change for name, change in changes.items() if change[0] != change[1]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _masked(name: str, value: Any) -> Any:
    """Return the value of an option; a mask if its name says that it is a secret."""
    if any(word in name.lower() for word in SECRET_WORDS):
        return MASK
    return _masked_url(value) if "://" in str(value) and "@" in str(value) else value


def _masked_url(url: str) -> str:
    """Return a database's URL without its password; nothing of one that cannot be read."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return MASK
    options = {name: _masked(name, value) for name, value in parsed.query.items()}
    return parsed.set(query=options).render_as_string(hide_password=True)
