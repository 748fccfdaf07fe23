"""A client on arm64, emulated by qemu, trains with a client on this machine.

Both must have the same model to the bit. `scripts/arm64-root` makes the arm64 system in a folder;
without it the test is skipped. The arm64 side uses the sources of this checkout, without torch.
Emulation says nothing about a device's speed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfleet.lab.digits import write_shards
from tests.deploy.settings import ROOT
from tests.support.fleet import HERE, PROGRAM, until
from tests.support.secure import SecureFleet, client

ARM = Path(os.environ.get("FAIRFLEET_ARM64", Path.home() / ".cache" / "fairfleet-arm64")) / "root"
QEMU = "/usr/bin/qemu-aarch64-static"
PARTS = ("proto", "common", "client", "server", "lab")
ROUNDS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ARM / QEMU.lstrip("/")).exists(),
        reason="no arm64 system: scripts/arm64-root makes one",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root"),
]


@pytest.fixture
def device() -> Iterator[Path]:
    """Return a folder inside the arm64 system with the sources of this checkout."""
    folder = Path(tempfile.mkdtemp(prefix="device-", dir=ARM))
    for part in PARTS:
        shutil.copytree(
            ROOT / part, folder / "src" / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(HERE / "noting.py", folder)
    write_shards(folder / "digits")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class MixedFleet(SecureFleet):
    """A server and a client on this machine, and a client on arm64, connected with mTLS.

    They train the numpy task of the demo.
    """

    def __init__(self, folder: Path, device: Path) -> None:
        super().__init__(folder)
        self.device = device
        self.inside = Path("/") / device.name

    def start_here(self, task: str) -> None:
        words = [
            "client",
            "--credentials",
            str(self.credentials_file(client("here"))),
            "--task",
            f"noting:{task}",
        ]
        words += ["--state-dir", str(self.folder / "clients")]
        words += self._options("0", self.device / "digits", self.folder / "here.notes")
        self.clients["here"] = self._start(words, "here.log")

    def start_on_arm(self, task: str) -> None:
        self.credentials(client("arm")).save(self.device / "arm.fleet")
        words = ["client", "--credentials", f"{self.inside}/arm.fleet", "--task", f"noting:{task}"]
        words += ["--state-dir", f"{self.inside}/state"]
        words += self._options("5", self.inside / "digits", self.inside / "notes")
        sources = [f"{self.inside}/src/{part}" for part in PARTS]
        path = ":".join([*sources, str(self.inside), "/opt/fairfleet", "/opt/torch"])
        command = [
            str(shutil.which("chroot")),
            str(ARM),
            QEMU,
            "/usr/bin/python3",
            *PROGRAM[1:],
            *words,
        ]
        with open(self.folder / "arm.log", "a") as log:
            self.clients["arm"] = subprocess.Popen(
                command,
                text=True,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PYTHONPATH": path, "HOME": "/root"},
            )

    @staticmethod
    def _options(shard: str, data: Path, notes: Path) -> list[str]:
        return ["-o", f"shard={shard}", "-o", f"data={data}", "-o", f"notes={notes}"]


CASES = [("task", {"compression__downlink": "int8"}), ("task", {"compression__model": "int8"})]
WITH_TORCH = pytest.param(
    "torch_task",
    {"compression__downlink": "int8"},
    marks=pytest.mark.skipif(
        not (ARM / "opt" / "torch").exists(), reason="TORCH=2.8.0 scripts/arm64-root brings it"
    ),
)


@pytest.mark.parametrize(("task", "downlink"), [*CASES, WITH_TORCH])
def test_a_client_on_arm64_trains_in_every_round_with_a_bit_identical_model(
    tmp_path: Path, device: Path, task: str, downlink: dict[str, str]
) -> None:
    fleet = MixedFleet(tmp_path, device)
    try:
        model = [
            "init",
            "--task",
            f"noting:{task}",
            *fleet._options("0", device / "digits", tmp_path / "none"),
        ]
        assert fleet.run(*model, "--output", str(tmp_path / "model.safetensors")).returncode == 0
        settings = {
            "codec": "int8",
            "plan__steps": 5,
            "plan__batch_size": 32,
            "round__quorum": 1.0,
            **downlink,
        }
        fleet.start_server(rounds=ROUNDS, lease_seconds=60, **settings)
        fleet.start_on_arm(task)
        fleet.start_here(task)
        until(lambda: fleet.version() >= ROUNDS or fleet.clients["arm"].poll(), "all rounds", 300)
        assert fleet.version() >= ROUNDS, fleet.log("arm.log")
        assert fleet.wait_clients(120) == {"here": 0, "arm": 0}, fleet.log("arm.log")
        for record in fleet.records():
            assert {c["client"] for c in record["contributions"]} == {"arm", "here"}
        on_arm = [line.split() for line in (device / "notes").read_text().splitlines()]
        native_notes = [line.split() for line in (tmp_path / "here.notes").read_text().splitlines()]
        assert {machine for machine, _ in on_arm} == {"aarch64"}
        assert {machine for machine, _ in native_notes} == {platform.machine()}
        assert len({digest for _, digest in on_arm}) == ROUNDS
        assert [digest for _, digest in on_arm] == [digest for _, digest in native_notes]
        # Both followed the changes: no client fetched a full model because its bits differed.
        for log in (fleet.log("arm.log"), fleet.log("here.log")):
            assert "fetched whole" not in log
            assert "raw32" not in log
    finally:
        fleet.end()
