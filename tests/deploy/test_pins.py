"""`make pins` renews versions and nothing else."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def renew_pins() -> ModuleType:
    """Return the script scripts/renew_pins.py as a module."""
    sys.path[:0] = folders = [str(ROOT / "scripts"), str(ROOT / "docker")]
    try:
        import renew_pins

        return renew_pins
    finally:
        for folder in folders:
            sys.path.remove(folder)


def test_comments_and_pins_with_a_marker_stay(renew_pins: ModuleType) -> None:
    text = (
        "# Exact versions.\n"
        "attrs==23.2.0  # dp-accounting takes none from 24 on\n"
        "removed==1.0\n"
        'torch==2.13.0 ; platform_machine != "aarch64"\n'
        'torch==2.8.0 ; platform_machine == "aarch64"  # CPU only\n'
    )
    versions = {"torch": "2.14.0", "attrs": "23.2.1", "Added": "2.0"}
    assert renew_pins.renewed_text(text, versions) == (
        "# Exact versions.\n"
        "Added==2.0\n"
        "attrs==23.2.1  # dp-accounting takes none from 24 on\n"
        'torch==2.13.0 ; platform_machine != "aarch64"\n'
        'torch==2.8.0 ; platform_machine == "aarch64"  # CPU only\n'
    )


def test_every_file_of_pins_exists_and_is_renewed(renew_pins: ModuleType) -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in [
            ROOT / "constraints.txt",
            ROOT / "k8s/checkov.txt",
            *ROOT.glob("proto/*requirements.txt"),
        ]
    }
    assert set(renew_pins.pin_files()) == files
    for name in files:
        assert (ROOT / name).read_text(encoding="utf-8").startswith("# Exact versions")
