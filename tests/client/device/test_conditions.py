"""The conditions under which a machine trains: the built-in ones, and a user's own."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from fairfleet.client.device import conditions
from fairfleet.client.device.availability import Availability
from fairfleet.client.device.conditions import Idle, condition, on_mains, on_unmetered_network
from fairfleet.client.settings import ClientSettings
from fairfleet.common.cli.settings import read_settings
from fairfleet.common.errors import BadSettings, UsageError
from tests.support.fleet import until


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_text(f"{content}\n")


# ---- mains -----------------------------------------------------------------------------------


def test_a_board_without_a_battery_is_on_mains(tmp_path: Path) -> None:
    assert on_mains(tmp_path) == on_mains(tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("status", "online", "refused"),
    [
        ("Discharging", "0", True),
        ("Charging", "1", False),
        ("Full", "1", False),
        ("Not charging", "1", False),  # stopped at 80 %
        ("Discharging", "1", False),  # a weak charger, but plugged in
        ("Unknown", "0", True),
    ],
)
def test_a_battery_that_is_not_charged_blocks_training(
    tmp_path: Path, status: str, online: str, refused: bool
) -> None:
    supply(tmp_path, "BAT0", type="Battery", status=status)
    supply(tmp_path, "AC", type="Mains", online=online)
    assert bool(on_mains(tmp_path)) is refused


def test_the_battery_of_a_mouse_is_not_the_boards(tmp_path: Path) -> None:
    supply(tmp_path, "hid-mouse", type="Battery", scope="Device", status="Discharging", online="1")
    assert on_mains(tmp_path) == ""
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert on_mains(tmp_path) == "on battery (discharging)"


# ---- unmetered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "refused"),
    [("u 0", True), ("u 1", True), ("u 2", False), ("u 3", True), ("u 4", False)],
)
def test_only_a_network_known_to_be_unmetered_allows_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, refused: bool
) -> None:
    """`busctl` answers as the real one prints NMMetered."""
    program = tmp_path / "busctl"
    program.write_text(
        f'#!/bin/sh\n[ "$1 $5" = "get-property Metered" ] || exit 9\necho {answer}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert bool(on_unmetered_network()) is refused


def test_without_networkmanager_the_network_counts_as_metered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot be queried" in on_unmetered_network()
    program = tmp_path / "busctl"
    program.write_text("#!/bin/sh\necho 'Failed to get property: no such service' >&2\nexit 1\n")
    program.chmod(0o755)
    assert "no such service" in on_unmetered_network()


# ---- idle ------------------------------------------------------------------------------------


def stat(busy: int, idle: int) -> str:
    return f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n"


def test_idle_measures_the_load_by_others_and_not_by_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "SHORTEST_WINDOW_SECONDS", 0.0)
    file, own = tmp_path / "stat", [0.0]
    monkeypatch.setattr(os, "times", lambda: (own[0], 0.0, 0.0, 0.0, 0.0))
    file.write_text(stat(1000, 1000))
    idle = Idle(25, file)
    file.write_text(stat(1010, 1190))
    assert idle() == ""  # 5 %
    file.write_text(stat(1110, 1290))
    assert idle() == "others use 50 % of the processors"
    file.write_text(stat(1210, 1390))
    own[0] = 100 / os.sysconf("SC_CLK_TCK")  # the same load again, but by this process
    assert idle() == ""


def test_idle_reads_the_machines_own_figures() -> None:
    assert isinstance(Idle(100)(), str)
    with pytest.raises(UsageError, match="needs"):
        Idle(25, Path("/nonexistent"))


# ---- a user's own ----------------------------------------------------------------------------


def test_a_commands_exit_code_decides_and_its_last_line_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert condition("run=true")() == ""
    assert condition("run=echo first; echo the shop is open; exit 1")() == "the shop is open"
    assert condition("run=exit 3")() == "exit 3 ended with 3"
    monkeypatch.setattr(conditions, "COMMAND_SECONDS", 0.2)
    assert "did not end within" in condition("run=exec sleep 60")()


@pytest.mark.slow
def test_a_command_that_hangs_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "COMMAND_SECONDS", 1.0)
    pid_file = tmp_path / "pid"
    assert "did not end within" in condition(f"run=(echo $$ > {pid_file}; sleep 60) | cat; false")()
    group = int(pid_file.read_text())
    until(lambda: not _alive(group), "its end")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_condition_that_hangs_or_exits_blocks_training() -> None:
    answers, hangs = ["", ""], threading.Event()

    def hanging() -> str:
        if answers:
            return answers.pop()
        hangs.wait(30)
        return ""

    availability = Availability([hanging], every_seconds=0.01, patience_seconds=2.0)
    assert availability.blocked_reason == ""
    until(lambda: availability.blocked_reason == "a condition does not answer", "a no")
    hangs.set()
    until(lambda: availability.blocked_reason == "", "a yes")

    def exits() -> str:
        raise SystemExit("enough")

    assert "SystemExit: enough" in Availability([exits]).blocked_reason


def test_a_function_returns_true_or_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "at_night.py").write_text(
        "def yes(): return True\ndef no(): return False\n"
        "def why(): return 'it is day'\ndef nothing(): pass\nfour = 4\n"
    )
    monkeypatch.chdir(tmp_path)
    assert condition("at_night:yes")() == ""
    assert condition("at_night:no")() == "at_night:no says no"
    assert condition("at_night:why")() == "it is day"
    assert condition("at_night:nothing")() == "at_night:nothing says no"
    (tmp_path / "broken_module.py").write_text("def (")
    for wrong in (
        "at_night:four",
        "at_night:missing",
        "no_such_module:f",
        "broken_module:f",
        "..x:y",
    ):
        with pytest.raises(UsageError, match=wrong):
            condition(wrong)
    sys.modules.pop("at_night", None)


@pytest.mark.parametrize(
    "wrong", ["sometimes", "idle=much", "idle=0", "idle=101", "run=", "unmetered=1"]
)
def test_an_unknown_condition_is_refused_with_a_list_of_the_known_ones(wrong: str) -> None:
    with pytest.raises(UsageError, match="idle=25"):
        condition(wrong)


def test_all_conditions_must_hold_and_a_failure_blocks_training() -> None:
    def breaks() -> str:
        raise OSError("no such sensor")

    assert (
        Availability().blocked_reason == Availability([lambda: "", lambda: ""]).blocked_reason == ""
    )
    assert Availability([lambda: "", lambda: "hot", lambda: "wet"]).blocked_reason == "hot"
    assert "no such sensor" in Availability([breaks]).blocked_reason


def test_the_answer_follows_a_condition_that_changes() -> None:
    reasons = ["rain"]
    availability = Availability([lambda: reasons[0]], every_seconds=0.01)
    assert availability.blocked_reason == "rain"
    reasons[0] = ""
    until(lambda: not availability.blocked_reason, "the condition to hold")


def test_conditions_are_checked_in_the_background() -> None:
    checks: list[float] = []

    def note_time() -> str:
        checks.append(time.monotonic())
        return ""

    Availability([note_time], every_seconds=0.01)
    until(lambda: len(checks) > 3, "more checks")


def test_conditions_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFLEET_WHEN", '["mains", "idle=40"]')
    settings = read_settings(ClientSettings, None, {"task": "a:b"})
    assert settings.when == ("mains", "idle=40")


@pytest.mark.parametrize("wrong", ["idle", "mains,idle", ""])
def test_a_variable_that_is_not_a_list_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("FAIRFLEET_WHEN", wrong)
    with pytest.raises(BadSettings, match=r'"when".*a list is JSON'):
        read_settings(ClientSettings, None, {"task": "a:b"})
