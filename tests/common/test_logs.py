from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from fairfleet.common import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_are_log_records_with_round_and_client(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(False, "json", "fairfleet-server")
    logging.getLogger("fairfleet.somewhere").warning("client %s is gone", "ann", extra={"client": "ann", "round": 3})
    told = json.loads(capsys.readouterr().err)
    assert told["body"] == "client ann is gone"
    assert (told["severity_text"], told["severity_number"]) == ("WARNING", 13)
    expected = {"code.namespace": "fairfleet.somewhere", "fairfleet.client": "ann", "fairfleet.round": 3}
    assert told["attributes"] == expected
    assert told["resource"] == {"service.name": "fairfleet-server"}
    assert told["timestamp"].endswith("+00:00")


def test_an_exception_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(False, "json")
    try:
        raise RuntimeError("this\nhas two lines")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    attributes = json.loads(line)["attributes"]
    assert attributes["exception.type"] == "RuntimeError"
    assert "test_logs.py" in attributes["exception.stacktrace"]


def test_what_happens_round_by_round_is_logged_for_programs_only(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(False, "text")
    logging.getLogger(logs.EVENTS).info("round 3 committed")
    assert capsys.readouterr().err == ""
    logs.set_up(False, "json")
    logging.getLogger(logs.EVENTS).info("round 3 committed")
    assert json.loads(capsys.readouterr().err)["body"] == "round 3 committed"
