"""When a machine takes part: the conditions that there are, and those of one's own."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from fairfleet.client import conditions
from fairfleet.client.conditions import Idle, condition, on_mains, on_unmetered_network
from fairfleet.client.settings import ClientSettings
from fairfleet.client.willing import Willing
from fairfleet.common.errors import BadSettings, UsageError
from fairfleet.common.settings import read_settings
from tests.e2e.fleet import until


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
        ("Not charging", "1", False),  # held at 80 %
        ("Discharging", "1", False),  # a weak charger: plugged in all the same
        ("Unknown", "0", True),
    ],
)
def test_a_battery_is_spared_while_nothing_charges_it(tmp_path: Path, status: str, online: str, refused: bool) -> None:
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
    ("answer", "refused"), [("u 0", True), ("u 1", True), ("u 2", False), ("u 3", True), ("u 4", False)]
)
def test_only_a_network_that_is_known_to_be_unmetered_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, refused: bool
) -> None:
    """`busctl` answers as the real one prints NMMetered."""
    program = tmp_path / "busctl"
    program.write_text(f'#!/bin/sh\n[ "$1 $5" = "get-property Metered" ] || exit 9\necho {answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert bool(on_unmetered_network()) is refused


def test_without_networkmanager_nobody_knows_and_that_is_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot be asked" in on_unmetered_network()
    program = tmp_path / "busctl"
    program.write_text("#!/bin/sh\necho 'Failed to get property: no such service' >&2\nexit 1\n")
    program.chmod(0o755)
    assert "no such service" in on_unmetered_network()


# ---- idle ------------------------------------------------------------------------------------


def stat(busy: int, idle: int) -> str:
    return f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n"


def test_idle_is_what_others_leave_over_and_own_work_does_not_count(
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
    own[0] = 100 / os.sysconf("SC_CLK_TCK")  # the same again, but it was this process
    assert idle() == ""


def test_idle_reads_the_machines_own_figures() -> None:
    assert isinstance(Idle(100)(), str)
    with pytest.raises(UsageError, match="needs"):
        Idle(25, Path("/nonexistent"))


# ---- one's own -------------------------------------------------------------------------------


def test_a_commands_exit_code_decides_and_its_last_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert condition("run=true")() == ""
    assert condition("run=echo first; echo the shop is open; exit 1")() == "the shop is open"
    assert condition("run=exit 3")() == "exit 3 ended with 3"
    monkeypatch.setattr(conditions, "COMMAND_SECONDS", 0.2)
    assert "did not end within" in condition("run=exec sleep 60")()


def test_a_command_that_hangs_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "COMMAND_SECONDS", 1.0)
    noted = tmp_path / "pid"
    assert "did not end within" in condition(f"run=(echo $$ > {noted}; sleep 60) | cat; false")()
    group = int(noted.read_text())
    until(lambda: not _alive(group), "its end")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_condition_that_hangs_or_ends_its_thread_is_a_no() -> None:
    answers, hangs = ["", ""], threading.Event()

    def hanging() -> str:
        if answers:
            return answers.pop()
        hangs.wait(30)
        return ""

    willing = Willing([hanging], every_seconds=0.01, patience_seconds=2.0)
    assert willing.why_not == ""
    until(lambda: willing.why_not == "a condition does not answer", "a no")
    hangs.set()
    until(lambda: willing.why_not == "", "a yes")

    def exits() -> str:
        raise SystemExit("enough")

    assert "SystemExit: enough" in Willing([exits]).why_not


def test_a_function_says_true_or_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "at_night.py").write_text(
        "def yes(): return True\ndef no(): return False\ndef why(): return 'it is day'\ndef nothing(): pass\nfour = 4\n"
    )
    monkeypatch.chdir(tmp_path)
    assert condition("at_night:yes")() == ""
    assert condition("at_night:no")() == "at_night:no says no"
    assert condition("at_night:why")() == "it is day"
    assert condition("at_night:nothing")() == "at_night:nothing says no"
    (tmp_path / "broken_module.py").write_text("def (")
    for wrong in ("at_night:four", "at_night:missing", "no_such_module:f", "broken_module:f", "..x:y"):
        with pytest.raises(UsageError, match=wrong):
            condition(wrong)
    sys.modules.pop("at_night", None)


@pytest.mark.parametrize("wrong", ["sometimes", "idle=much", "idle=0", "idle=101", "run=", "unmetered=1"])
def test_a_condition_that_is_none_is_said_with_those_there_are(wrong: str) -> None:
    with pytest.raises(UsageError, match="idle=25"):
        condition(wrong)


def test_all_conditions_must_hold_and_one_that_fails_is_a_no() -> None:
    def breaks() -> str:
        raise OSError("no such sensor")

    assert Willing().why_not == Willing([lambda: "", lambda: ""]).why_not == ""
    assert Willing([lambda: "", lambda: "hot", lambda: "wet"]).why_not == "hot"
    assert "no such sensor" in Willing([breaks]).why_not


def test_the_answer_follows_the_world() -> None:
    world = ["rain"]
    willing = Willing([lambda: world[0]], every_seconds=0.01)
    assert willing.why_not == "rain"
    world[0] = ""
    until(lambda: not willing.why_not, "the sun")


def test_conditions_are_asked_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    Willing([lambda: asked.append(time.monotonic()) or ""], every_seconds=0.01)  # type: ignore[func-returns-value]
    until(lambda: len(asked) > 3, "more questions")


def test_when_can_be_given_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFLEET_WHEN", '["mains", "idle=40"]')
    settings = read_settings(ClientSettings, None, {"task": "a:b"})
    assert settings.when == ("mains", "idle=40")


@pytest.mark.parametrize("wrong", ["idle", "mains,idle", ""])
def test_a_variable_that_is_no_list_is_said_with_its_name(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("FAIRFLEET_WHEN", wrong)
    with pytest.raises(BadSettings, match=r'"when".*a list is JSON'):
        read_settings(ClientSettings, None, {"task": "a:b"})
