"""Log lines on standard error: for people, or as JSON in the form of OpenTelemetry's log records.

A call that knows of which round or client it speaks says so by `extra={"round": …, "client": …}`. In JSON these become
attributes; people have them in the message.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]

EVENTS = "fairfleet.events"  # the logger of what happens round by round: for programs, people have `fairfleet watch`
ATTRIBUTES = ("round", "client", "event", "seconds", "updates", "dropped", "reported", "asked")
SEVERITY = {logging.DEBUG: 5, logging.INFO: 9, logging.WARNING: 13, logging.ERROR: 17, logging.CRITICAL: 21}


def set_up(verbose: bool, format: Format = "text", service: str = "fairfleet") -> None:
    handler = logging.StreamHandler(sys.stderr)
    as_json = format == "json"
    handler.setFormatter(Json(service) if as_json else logging.Formatter(TEXT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger(EVENTS).setLevel(logging.INFO if as_json else logging.WARNING)


def say_always(**attributes: str) -> None:
    """From now on every JSON line has these, for example whose it is."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Json):
            handler.formatter.always |= {f"fairfleet.{name}": value for name, value in attributes.items()}


TEXT = "%(asctime)s %(levelname)-7s %(message)s"


class Json(logging.Formatter):
    """One object a line, with the names of OpenTelemetry's log data model."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._resource = {"service.name": service}
        self.always: dict[str, Any] = {}  # attributes of every line

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "severity_text": record.levelname,
            "severity_number": SEVERITY.get(record.levelno, 0),
            "body": record.getMessage(),
            "attributes": self.always | _attributes(record),
            "resource": self._resource,
        }
        return json.dumps(told, default=str)


def _attributes(record: logging.LogRecord) -> dict[str, Any]:
    known = {f"fairfleet.{name}": getattr(record, name) for name in ATTRIBUTES if hasattr(record, name)}
    told = {"code.namespace": record.name, **known}
    if record.exc_info and record.exc_info[0] is not None:
        told["exception.type"] = record.exc_info[0].__name__
        told["exception.message"] = str(record.exc_info[1])
        told["exception.stacktrace"] = logging.Formatter().formatException(record.exc_info)
    return told
