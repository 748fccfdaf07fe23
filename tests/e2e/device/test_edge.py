"""A device in the field:

offline for days, out of date, low on disk; and docs/how-to/edge.md as written.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest

from fairfleet.client.agent.pauses import CALL_SECONDS, PATIENT_PAUSE_SECONDS
from fairfleet.client.settings import ClientSettings
from fairfleet.common.cli.settings import read_settings
from tests.deploy.settings import ROOT
from tests.support.fleet import HERE, PROGRAM, Fleet, free_port, until
from tests.support.scraping import scrape, series
from tests.support.secure import SecureFleet, client, operator

DAY_OF_TRIES = int(
    86_400 / (CALL_SECONDS + PATIENT_PAUSE_SECONDS / 2)
)  # the longest wait between a client's tries


@pytest.mark.slow
def test_after_a_day_without_a_server_a_client_is_unchanged_and_sends_its_update(
    fleet: Fleet,
) -> None:
    """Make as many tries as in a day, without delays: nothing grows and the log stays short.

    The trained update is sent when the server returns.
    """
    fleet.init()
    settings = {
        "rounds": 1,
        "round__quorum": 1.0,
        "round__deadline_seconds": 3600,
        "lease_seconds": 60,
    }
    fleet.start_server(**settings)
    port = free_port()
    fleet.program = [sys.executable, str(HERE / "hasty.py")]
    device = fleet.start_client(
        "device", "--metrics", f"127.0.0.1:{port}", steps=20, step_seconds=0.1
    )
    fleet.program = PROGRAM
    fleet.start_client("other")
    until(lambda: fleet.query("select client from updates") == [("other",)], "the other's update")
    assert fleet.stop_server() == 0
    tries = lambda: scrape(port)[series("fairfleet_agent_retries_total")]  # noqa: E731
    until(lambda: tries() > DAY_OF_TRIES / 10, "it to notice", 120)
    process = psutil.Process(device.pid)
    before = process.memory_info().rss, process.num_fds(), process.num_threads()
    until(lambda: tries() > DAY_OF_TRIES, "a day to pass", 300)
    after = process.memory_info().rss, process.num_fds(), process.num_threads()
    assert after[0] - before[0] < 20 << 20
    assert after[1] - before[1] < 10
    assert after[2] - before[2] < 10
    assert len(fleet.log("device.log").splitlines()) < 60
    fleet.start_server(**settings)
    fleet.wait_for_version(1)
    assert fleet.wait_clients() == {"device": 0, "other": 0}, fleet.log("device.log")
    assert "answers again, after" in fleet.log("device.log")
    fleet.kill_server()
    fleet.prove(1)


@pytest.mark.slow
def test_a_device_whose_certificate_expired_offline_is_told_how_to_renew_and_does_so(
    tmp_path: Path,
) -> None:
    fleet = SecureFleet(tmp_path)
    try:
        fleet.init()
        fleet.start_server(rounds=100_000, round__minimum_clients=1)
        file = fleet.credentials_file(
            client("device"), ttl=timedelta(seconds=10), now=datetime.now(UTC)
        )
        fleet.start_client("device")
        fleet.wait_for_version(1)
        fleet.kill_client("device")  # the device is switched off
        time.sleep(11)
        assert fleet.start_client("device").wait(60) == 2
        assert "the certificate of client device expired on" in fleet.log("device.log")
        assert (
            "Request a new file from the operator (made there by `fairfleet renew`), or a token."
            in fleet.log("device.log")
        )

        own = [
            "--credentials",
            str(fleet.credentials_file(operator("operator"))),
            "--server",
            fleet.address,
        ]
        token = fleet.run("token", "device", *own)
        assert token.returncode == 0, token.stderr
        enrol = ["enroll", "--token", token.stdout.strip(), "--output", str(file)]
        refused = fleet.run(*enrol)
        assert (refused.returncode, "exists already; remove it" in refused.stderr) == (2, True)
        file.unlink()
        done = fleet.run(*enrol)
        assert done.returncode == 0, done.stderr
        reached = fleet.version()
        fleet.start_client("device")
        fleet.wait_for_version(reached + 2)
    finally:
        fleet.end()


@pytest.mark.parametrize(
    ("codec", "feedback", "flags", "bytes_per_parameter"),
    [
        ("int8", "auto", (), 1.1),
        ("int8", "true", (), 9.2),
        ("int8", "true", ("--no-error-feedback",), 1.1),
        ("raw32", "auto", (), 4.1),
    ],
)
def test_the_disk_usage_of_a_client_is_bounded(
    fleet: Fleet, codec: str, feedback: str, flags: tuple[str, ...], bytes_per_parameter: float
) -> None:
    """The bound of docs/how-to/edge.md: the unsent update, and twice what the codec lost."""
    fleet.init(size=200_000)
    settings = {"codec": codec, "compression__error_feedback": feedback}
    fleet.start_server(rounds=6, round__minimum_clients=1, **settings)
    fleet.start_client("device", *flags)
    most = 0
    deadline = time.monotonic() + 60
    while fleet.clients["device"].poll() is None:
        assert time.monotonic() < deadline, "the client did not end within 60 s"
        most = max(most, used(fleet.folder / "clients" / "device"))
        time.sleep(0.01)
    most = max(most, used(fleet.folder / "clients" / "device"))
    assert 0.4 * bytes_per_parameter * fleet.size < most < bytes_per_parameter * fleet.size


@pytest.mark.slow
def test_an_owner_can_switch_error_feedback_off_in_mid_federation(fleet: Fleet) -> None:
    """What the last updates lost is dropped then, and not sent when it is on again some day."""
    fleet.init()
    settings = {"codec": "topk:0.1", "compression__error_feedback": "true"}
    settings |= {"compression__prediction": "false"}
    fleet.start_server(rounds=100_000, round__minimum_clients=1, **settings)
    for flags, residuals in (((), 1), (("--no-error-feedback",), 0), ((), 1)):
        fleet.start_client("device", *flags)
        fleet.wait_for_version(fleet.version() + 3)
        fleet.kill_client("device")
        files = list(fleet.client_folder("device").glob("residual"))
        assert len(files) == residuals, (flags, files)


def used(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # renamed in the meantime
            continue
    return total


# ---- the document ----------------------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "how-to" / "edge.md").read_text()


def block(language: str, sign: str) -> str:
    blocks = re.findall(r"```(\w*)\n(.*?)```", DOCUMENT, re.S)
    (block_text,) = [text for kind, text in blocks if kind == language and sign in text]
    return str(block_text)


def test_the_documented_task_and_conditions_work(fleet: Fleet) -> None:
    """Run the task, condition and settings of the document without torch; only paths differ."""
    board = fleet.folder / "etc"
    board.mkdir()
    (board / "my_task.py").write_text(block("python", "import SoftmaxTask"))
    (board / "my_conditions.py").write_text(block("python", "def cool_enough"))
    random = np.random.default_rng(0)
    np.savez(
        board / "readings.npz",
        x=random.normal(size=(60, 12)).astype(np.float32),
        y=random.integers(0, 4, 60),
    )
    init = subprocess.run(
        [
            *PROGRAM,
            "init",
            "--task",
            "my_task:task",
            "--output",
            str(fleet.folder / "model.safetensors"),
        ],
        cwd=board,
        capture_output=True,
        text=True,
        check=False,
    )
    assert init.returncode == 0, init.stderr
    fleet.start_server(rounds=3, round__minimum_clients=1, plan__steps=3)
    words = ["client", "--task", "my_task:task", "--server", fleet.address, "--name", "board"]
    words += ["--when", "my_conditions:cool_enough", "--state-dir", str(fleet.folder / "clients")]
    done = subprocess.run(
        [*PROGRAM, *words], cwd=board, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert fleet.version() == 3


def test_the_documented_settings_equal_the_example_and_are_valid() -> None:
    text = block("yaml", "credentials:")
    assert text.strip() in (ROOT / "deploy" / "systemd" / "client.yaml").read_text()


def test_every_documented_option_exists(tmp_path: Path) -> None:
    help_text = subprocess.run(
        [*PROGRAM, "client", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in re.findall(r"(--max-[a-z-]+|--when)", DOCUMENT):
        assert option in help_text
    assert read_settings(ClientSettings, None, {"task": "a:b", "when": ["idle=40"]}).when == (
        "idle=40",
    )
