"""Log lines on standard error: text for people, or JSON in the form of OpenTelemetry's log records.

A call that concerns a round or a client passes `extra={"round": …, "client": …}`. In JSON these
become attributes of the record. In text they appear only where the message itself names them.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]

# The logger of what happens round by round. For programs it logs everything; for people, progress.
EVENTS = "fairfleet.events"
# Events that a text log shows, and how many seconds of rounds one line stands for: rounds of a
# small model may take milliseconds. `fairfleet watch` shows every round.
THINNED = ("round_committed", "update_sent")
PROGRESS = (*THINNED, "evaluation_finished", "server_evaluated", "evaluated")
SECONDS_PER_LINE = 1.0
ATTRIBUTES = ("round", "client", "event", "seconds", "updates", "dropped", "reported", "asked")
SEVERITY = {
    logging.DEBUG: 5,
    logging.INFO: 9,
    logging.WARNING: 13,
    logging.ERROR: 17,
    logging.CRITICAL: 21,
}
TEXT = "%(asctime)s %(levelname)-7s %(message)s"


def set_up(verbose: bool, log_format: Format = "text", service: str = "fairfleet") -> None:
    """Send all log lines to standard error; `service` names this program in JSON lines.

    JSON has all round-by-round events, text only those that show progress.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = log_format == "json"
    handler.setFormatter(JsonFormatter(service) if as_json else logging.Formatter(TEXT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    events = logging.getLogger(EVENTS)
    events.setLevel(logging.INFO)
    events.filters[:] = [] if as_json else [ProgressFilter()]


def add_attributes(**attributes: str) -> None:
    """Add attributes to every JSON line from now on, for example the client's name."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.common_attributes |= {
                f"fairfleet.{name}": value for name, value in attributes.items()
            }


class ProgressFilter(logging.Filter):
    """Passes events that show progress, and of rounds within one second only the first."""

    def __init__(self) -> None:
        super().__init__()
        self._shown_at = -SECONDS_PER_LINE

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record of an event is shown."""
        event = getattr(record, "event", None)
        if event in THINNED:
            if 0 <= record.created - self._shown_at < SECONDS_PER_LINE:
                return False
            self._shown_at = record.created
        return event in PROGRESS


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object per line, with OpenTelemetry's field names."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._resource = {"service.name": service}
        self.common_attributes: dict[str, Any] = {}  # of every line

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        time = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "timestamp": time.isoformat(timespec="microseconds"),
            "severity_text": record.levelname,
            "severity_number": SEVERITY.get(record.levelno, 0),
            "body": record.getMessage(),
            "attributes": self.common_attributes | _attributes(record),
            "resource": self._resource,
        }
        return json.dumps(fields, default=str)


def _attributes(record: logging.LogRecord) -> dict[str, Any]:
    attributes = {"code.namespace": record.name}
    for name in ATTRIBUTES:
        if hasattr(record, name):
            attributes[f"fairfleet.{name}"] = getattr(record, name)
    if record.exc_info and record.exc_info[0] is not None:
        attributes["exception.type"] = record.exc_info[0].__name__
        attributes["exception.message"] = str(record.exc_info[1])
        attributes["exception.stacktrace"] = logging.Formatter().formatException(record.exc_info)
    return attributes
