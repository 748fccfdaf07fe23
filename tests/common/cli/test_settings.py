"""Settings: flags over variables over the file over defaults, and every mistake with its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairfleet.client.settings import ClientSettings
from fairfleet.common.cli.settings import default_text, parse_assignment, read_settings
from fairfleet.common.errors import BadSettings
from fairfleet.server.settings import ServerSettings


def test_flags_win_over_variables_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text(
        "rounds: 7\nplan: {learning_rate: 0.5, batch_size: 8, steps: 3}\nround: {quorum: 0.4}\n"
    )
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
    for path in (
        "rounds:",
        "plan.solver:",
        "listen: must be host:port",
        "speling: there is no such",
        "codec: unknown",
    ):
        assert path in message


SECRET = "hunter2-of-the-owner"


@pytest.mark.parametrize(
    "text",
    [
        # Settings that contradict each other: the mistake is one of the whole input.
        "http: {token: SECRET}\nrule: {name: no-such-rule}\n",
        "database: postgresql://u:SECRET@db/fleet\nend: {worst_10_percent: 7}\n",
        "http: {token: [SECRET]}\n",
        "http: [SECRET]\n",
        "database: [SECRET]\n",
        "database: SECRET\ndatabase_schema: [SECRET]\n",
        "evaluation: {task: 'a:b', options: {password: [SECRET]}}\n",
        "http:\n  token: SECRET: 5\n",  # no YAML
    ],
)
def test_no_mistake_shows_a_secret_or_the_python_of_a_value(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret.yaml"
    file.write_text(text.replace("SECRET", SECRET))
    with pytest.raises(BadSettings) as caught:
        read_settings(ServerSettings, file, {"tensorboard": tmp_path, "model": tmp_path})
    message = str(caught.value)
    assert SECRET not in message
    for python in ("PosixPath", "SecretStr", "{", "[", "None"):
        assert python not in message


@pytest.mark.parametrize("secret", ["12345678", "0b1", "true", "[12345678]"])
def test_a_token_that_is_no_text_is_not_shown(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "secret.yaml"
    file.write_text(f"http: {{token: {secret}}}\n")
    with pytest.raises(BadSettings) as caught:
        read_settings(ServerSettings, file, {})
    assert "http.token: Input should be a valid string" in str(caught.value)
    assert "found" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"rounds": -1}, "(found -1)"),
        ({"listen": "here"}, "(found 'here')"),
        ({"rounds": Path("some/where")}, "(found 'some/where')"),
        ({"rounds": None}, "(found null)"),
        ({"name": True}, "(found true)"),
        ({"round.quorum": "most"}, "(found 'most')"),
    ],
)
def test_a_single_wrong_value_is_shown(flags: dict[str, object], found: str) -> None:
    with pytest.raises(BadSettings) as caught:
        read_settings(ServerSettings, None, flags)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("a: [", "is not YAML"),
        ("a: 2024-13-01", "is not YAML: month must be in"),
        ("- 1", "must hold a mapping"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadSettings, match=message):
        read_settings(ServerSettings, file, {})


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert read_settings(ServerSettings, tmp_path / "empty.yaml", {}) == read_settings(
        ServerSettings, None, {}
    )


def test_lists_and_mappings_on_the_command_line_are_read_as_yaml() -> None:
    assert parse_assignment("split=[0.8, 0.2]") == ("split", [0.8, 0.2])
    assert parse_assignment("stragglers={share: 0.3}") == ("stragglers", {"share": 0.3})
    assert parse_assignment("rule=fedlf,a=b") == ("rule", "fedlf,a=b")
    assert parse_assignment("verification=null") == ("verification", None)


@pytest.mark.parametrize("text", ["007", "1e3", "2024-12-01", "yes", "0x1F"])
def test_a_number_on_the_command_line_stays_text_for_the_setting_to_convert(text: str) -> None:
    """YAML would make 007 a 7, but a federation's name or a token may consist of digits."""
    assert parse_assignment(f"name={text}") == ("name", text)
    assert parse_assignment(f'name="{text}"') == ("name", text)
    settings = read_settings(ServerSettings, None, dict([parse_assignment("name=007")]))
    assert settings.name == "007"
    flags = dict(map(parse_assignment, ("rounds=12", "insecure=true", "round.quorum=0.5")))
    settings = read_settings(ServerSettings, None, flags)
    assert (settings.rounds, settings.insecure, settings.round.quorum) == (12, True, 0.5)


def test_help_can_show_the_default_of_a_setting() -> None:
    assert default_text(ServerSettings, "listen") == "127.0.0.1:8440"
    assert default_text(ServerSettings, "rule.name") == "fedavg"
    assert default_text(ServerSettings, "round.minimum_clients") == "2"
    assert default_text(ServerSettings, "database") == "none"


def test_an_address_in_brackets_needs_no_quotes() -> None:
    assert parse_assignment("listen=[::]:8440") == ("listen", "[::]:8440")


@pytest.mark.parametrize(
    "text", ["split=[0.8", "rule={a: 1", "day=2024-13-01", "name=\x01", "codec=%a"]
)
def test_a_value_that_is_not_yaml_is_named_with_its_flag(text: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(f"--set {text!r}: the value is not YAML: ")):
        parse_assignment(text)


def test_off_may_be_written_without_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML reads a bare off as false."""
    file = tmp_path / "federation.yaml"
    file.write_text("diagnostics: off\nadmission: {norm: off, samples: cap}\n")
    settings = read_settings(ServerSettings, file, {})
    assert (settings.diagnostics, settings.admission.norm, settings.admission.samples) == (
        "off",
        "off",
        "cap",
    )
    assert read_settings(ServerSettings, None, {}).diagnostics == "auto"
    flags = dict([parse_assignment("diagnostics=off")])
    assert read_settings(ServerSettings, None, flags).diagnostics == "off"
    monkeypatch.setenv("FAIRFLEET_DIAGNOSTICS", "model")
    assert read_settings(ServerSettings, None, {}).diagnostics == "model"
    with pytest.raises(BadSettings, match="diagnostics"):
        read_settings(ServerSettings, None, {"diagnostics": "some"})


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("rounnds", "rounds"),
        ("plan.learning_rat", "plan.learning_rate"),
        ("http_port", "http.port"),
        ("deadline_seconds", "round.deadline_seconds"),
        ("htp.port", "http"),
    ],
)
def test_a_mistyped_setting_is_answered_with_the_similar_one(mistyped: str, meant: str) -> None:
    with pytest.raises(BadSettings, match=f"did you mean '{re.escape(meant)}'\\?"):
        read_settings(ServerSettings, None, {mistyped: "1"})


def test_a_setting_that_is_similar_to_none_gets_no_advice() -> None:
    with pytest.raises(BadSettings) as caught:
        read_settings(ServerSettings, None, {"xyzzyplugh": "1"})
    assert str(caught.value).endswith("xyzzyplugh: there is no such setting")


def test_a_missing_task_is_answered_with_how_to_give_it() -> None:
    with pytest.raises(BadSettings, match=r"module:name of a Task.*--task my_task:task"):
        read_settings(ClientSettings, None, {})
