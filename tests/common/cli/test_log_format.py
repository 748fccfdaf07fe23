"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from fairfleet.common.cli import log_format


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_are_log_records_with_round_and_client(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_format.set_up(False, "json", "fairfleet-server")
    logging.getLogger("fairfleet.somewhere").warning(
        "client %s is gone", "ann", extra={"client": "ann", "round": 3}
    )
    record = json.loads(capsys.readouterr().err)
    assert record["body"] == "client ann is gone"
    assert (record["severity_text"], record["severity_number"]) == ("WARNING", 13)
    expected = {
        "code.namespace": "fairfleet.somewhere",
        "fairfleet.client": "ann",
        "fairfleet.round": 3,
    }
    assert record["attributes"] == expected
    assert record["resource"] == {"service.name": "fairfleet-server"}
    assert record["timestamp"].endswith("+00:00")


def test_an_exception_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    log_format.set_up(False, "json")
    try:
        raise RuntimeError("this\nhas two lines")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    attributes = json.loads(line)["attributes"]
    assert attributes["exception.type"] == "RuntimeError"
    assert "test_log_format.py" in attributes["exception.stacktrace"]


def event(kind: str, text: str, seconds: float) -> None:
    fields = {"msg": text, "event": kind, "created": seconds, "levelno": logging.INFO}
    record = logging.makeLogRecord({"name": log_format.EVENTS, "levelname": "INFO", **fields})
    logging.getLogger(log_format.EVENTS).handle(record)


def test_a_text_log_shows_progress_and_json_all_events(capsys: pytest.CaptureFixture[str]) -> None:
    log_format.set_up(False, "text")
    event("round_started", "round 3: 2 clients selected", 1000.0)
    event("round_committed", "round 3 committed", 1000.5)
    event("round_committed", "round 4 committed", 1000.9)
    event("evaluation_finished", "version 4 evaluated", 1000.9)
    event("round_committed", "round 5 committed", 1001.6)
    event("round_committed", "round 6 committed", 900.0)  # the clock was set back
    shown = [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == [
        "round 3 committed",
        "version 4 evaluated",
        "round 5 committed",
        "round 6 committed",
    ]
    log_format.set_up(False, "json")
    logging.getLogger(log_format.EVENTS).info("round 3 committed")
    assert json.loads(capsys.readouterr().err)["body"] == "round 3 committed"
