"""Replicas of one service: each has its own number, in its name, data and credentials."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairfleet.client.device.replica import claim, number_in, number_of
from fairfleet.client.settings import ClientSettings
from fairfleet.common.cli.settings import read_settings
from fairfleet.common.errors import BadSettings, StateDirError, UsageError
from fairfleet.common.pki.provisioning import ProvisionedFleet
from tests.support.flock_holder import flock_held

HOLD = """
import sys, time
from pathlib import Path
from fairfleet.client.device.replica import number_of
with number_of("claim", Path(sys.argv[1])) as number:
    print(number, flush=True)
    time.sleep(600)
"""


class Holder:
    """Another process that has claimed a number."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.number = int(self.process.stdout.readline())

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait(10)


def test_each_process_has_its_own_number_and_a_replacement_gets_the_number_of_a_dead_one(
    tmp_path: Path,
) -> None:
    holders = [Holder(tmp_path) for _ in range(3)]
    try:
        assert [holder.number for holder in holders] == [0, 1, 2]
        holders[1].end(signal.SIGKILL)
        holders.append(Holder(tmp_path))
        assert holders[3].number == 1
    finally:
        for holder in holders:
            holder.end()


def test_a_killed_replica_frees_its_number_although_a_process_that_it_forked_lives(
    tmp_path: Path,
) -> None:
    fork = "    if os.fork() == 0: print(os.getpid(), flush=True), time.sleep(600)\n    print("
    words = [sys.executable, "-c", "import os" + HOLD.replace("    print(", fork), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = {int(process.stdout.readline()) for _ in range(2)}  # by the child: its number
        (child,) = printed - {0}
        try:
            process.kill()
            process.wait(10)
            with number_of("claim", tmp_path) as number:
                assert number == 0
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_number_that_an_older_version_holds_is_skipped(tmp_path: Path) -> None:
    with flock_held(tmp_path / "replica-0.lock"), number_of("claim", tmp_path) as number:
        assert number == 1
    with number_of("claim", tmp_path) as number:
        assert number == 0


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirError, match="state-dir"):
        claim(tmp_path / "file")


@pytest.mark.parametrize(
    ("host", "number"), [("fairfleet-client-0", 0), ("client-12", 12), ("7", 7)]
)
def test_the_number_of_a_stateful_set_is_at_the_end_of_the_host_name(
    host: str, number: int
) -> None:
    assert number_in(host) == number


@pytest.mark.parametrize("host", ["client", "client-", "3f2a91c07d2b", "client-3.example"])
def test_a_host_name_without_a_number_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="StatefulSet"):
        number_in(host)


def test_the_number_replaces_the_mark_in_name_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "TASK": "a:b",
        "NAME": "device-{replica}",
        "REPLICA": "claim",
        "OPTIONS__SHARD": "{replica}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"FAIRFLEET_{name}", value)
    settings = read_settings(ClientSettings, None, {}).numbered(4)
    assert settings.name == "device-4"
    assert settings.options == {"shard": "4"}


def test_a_replica_mark_without_a_source_is_refused() -> None:
    with pytest.raises(BadSettings, match="set replica to hostname or claim"):
        read_settings(ClientSettings, None, {"task": "a:b", "name": "device-{replica}"})


def test_a_replica_without_a_name_gets_that_of_its_credentials(
    tmp_path: Path,
) -> None:
    ProvisionedFleet(
        tmp_path, ["server"], "server:8440", "server:8440", ["client-0", "client-1"]
    ).provision()
    given = {
        "task": "a:b",
        "replica": "claim",
        "credentials": str(tmp_path / "clients" / "client-{replica}.fleet"),
    }
    settings, access = read_settings(ClientSettings, None, given).numbered(1).identified()
    assert (settings.name, access.address) == ("client-1", "server:8440")
    with pytest.raises(UsageError, match="not of --name other"):
        read_settings(ClientSettings, None, {**given, "name": "other"}).numbered(1).identified()
