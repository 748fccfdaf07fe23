"""Settings: flags over variables over the file over defaults, and every mistake with its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairfleet.common.errors import BadSettings
from fairfleet.common.settings import pair, read_settings
from fairfleet.server.settings import ServerSettings


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text("rounds: 7\nplan: {learning_rate: 0.5, batch_size: 8, steps: 3}\nround: {quorum: 0.4}\n")
    monkeypatch.setenv("FAIRFLEET_PLAN__LEARNING_RATE", "0.25")
    monkeypatch.setenv("FAIRFLEET_ROUND__MINIMUM_CLIENTS", "9")
    settings = read_settings(ServerSettings, file, {"plan.batch_size": "64", "codec": "fp16"})
    assert (settings.rounds, settings.round.quorum, settings.plan.steps) == (7, 0.4, 3)
    assert (settings.plan.learning_rate, settings.round.minimum_clients) == (0.25, 9)
    assert (settings.plan.batch_size, settings.codec) == (64, "fp16")
    assert settings.round.deadline_seconds == 600


def test_all_mistakes_are_reported_with_their_paths(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("rounds: -1\nplan: {solver: magic}\nlisten: here\nspeling: 1\n")
    with pytest.raises(BadSettings) as caught:
        read_settings(ServerSettings, file, {"codec": "zip"})
    message = str(caught.value)
    assert "5 mistakes" in message
    for path in ("rounds:", "plan.solver:", "listen: must be host:port", "speling: there is no such", "codec: unknown"):
        assert path in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("a: [", "is not YAML"),
        ("a: 2024-13-01", "is not YAML: month must be in"),
        ("- 1", "must hold a mapping"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadSettings, match=message):
        read_settings(ServerSettings, file, {})


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert read_settings(ServerSettings, tmp_path / "empty.yaml", {}) == read_settings(ServerSettings, None, {})


def test_a_value_on_the_command_line_is_read_as_yaml() -> None:
    assert pair("split=[0.8, 0.2]") == ("split", [0.8, 0.2])
    assert pair("rule=fedlf,a=b") == ("rule", "fedlf,a=b")


@pytest.mark.parametrize("text", ["split=[0.8", "rule={a: 1", "day=2024-13-01", "name=\x01", "codec=%a"])
def test_a_value_that_is_not_yaml_is_named_with_its_flag(text: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(f"--set {text!r}: the value is not YAML: ")):
        pair(text)
