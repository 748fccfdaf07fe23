"""The units of deploy/systemd pass systemd's own checks and fit the program they start."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from fairfleet.client.device.conditions import condition
from fairfleet.client.settings import ClientSettings
from fairfleet.common import errors
from fairfleet.common.cli.settings import read_settings
from tests.deploy.settings import ROOT
from tests.support.fleet import PROGRAM

UNITS = ROOT / "deploy" / "systemd"
SERVICES = ("fairfleet-client.service", "fairfleet-renew.service")
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd-analyze here"
)


def service(name: str) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().split("[Service]")[1].split("[Install]")[0].splitlines():
        key, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def verified(units: list[str]) -> str:
    words = ["systemd-analyze", "verify", "--man=no", *units]
    return subprocess.run(words, capture_output=True, text=True, check=False).stderr


@needs_systemd
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """The program of the units may not be installed, so /bin/true replaces it."""
    for unit in UNITS.glob("fairfleet-*"):
        text = re.sub(r"/opt/fairfleet/bin/fairfleet", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    assert len(units) == 3
    assert [line for line in verified(units).splitlines() if "fairfleet-" in line] == []
    wrong = tmp_path / "fairfleet-client.service"
    wrong.write_text(wrong.read_text().replace("ProtectSystem=strict", "ProtectSystems=strict"))
    assert "ProtectSystems" in verified(units)  # A mistake is reported.


@needs_systemd
def test_systemd_accepts_the_drop_in_of_the_guide(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "how-to" / "edge.md").read_text(encoding="utf-8")
    (drop_in,) = re.findall(r"```ini\n(.*?)```", guide, re.DOTALL)
    text = (UNITS / SERVICES[0]).read_text().replace("/opt/fairfleet/bin/fairfleet", "/bin/true")
    unit, folder = tmp_path / SERVICES[0], tmp_path / f"{SERVICES[0]}.d"
    unit.write_text(text)
    folder.mkdir()
    for content, accepted in ((drop_in, True), (drop_in.replace("ReadWrite", "ReadsWrite"), False)):
        (folder / "override.conf").write_text(content)
        assert ("override.conf" not in verified([str(unit)])) == accepted


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_the_exposure_score_of_systemd_is_low(name: str) -> None:
    words = [
        "systemd-analyze",
        "security",
        "--no-pager",
        "--offline=true",
        "--threshold=20",
        str(UNITS / name),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("name", SERVICES)
def test_the_program_has_the_options_of_the_unit(name: str) -> None:
    (start,) = service(name)["ExecStart"]
    program, command, *words = shlex.split(start)
    assert program == "/opt/fairfleet/bin/fairfleet"
    output = subprocess.run(
        [*PROGRAM, command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for word in words:
        assert not word.startswith("-") or word in output


def test_it_is_not_restarted_after_errors_that_need_a_person() -> None:
    (codes,) = service("fairfleet-client.service")["RestartPreventExitStatus"]
    needs_a_person = (errors.UsageError, errors.StateDirError, errors.Refused, errors.Superseded)
    assert sorted(map(int, codes.split())) == sorted(error.exit_code for error in needs_a_person)
    assert errors.Unreachable.exit_code not in map(int, codes.split())


def test_the_example_settings_are_valid_and_use_the_state_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (environment,) = service("fairfleet-client.service")["Environment"]
    for name, value in (pair.split("=", 1) for pair in shlex.split(environment)):
        monkeypatch.setenv(name, value)
    settings = read_settings(ClientSettings, UNITS / "client.yaml", {})
    assert [condition(text) for text in settings.when]
    own = Path("/var/lib/fairfleet")  # StateDirectory
    assert settings.state_dir.is_relative_to(own)
    assert settings.credentials is not None
    assert settings.credentials.is_relative_to(own)  # The same user renews it there.
    (renew,) = service("fairfleet-renew.service")["ExecStart"]
    assert renew.endswith(str(settings.credentials))


def test_the_timer_renews_well_before_a_certificate_expires() -> None:
    timer = configparser.ConfigParser()
    timer.read(UNITS / "fairfleet-renew.timer")
    assert timer["Timer"]["OnCalendar"] == "weekly"  # of 90 days
    assert timer["Timer"]["Persistent"] == "true"  # and at the next start, if the device was off
