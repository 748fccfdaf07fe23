"""The client starts and trains without what only Unix has: modules, calls and signals.

There is no Windows here. So FairFleet's own code gets a Python from which these are removed, and
the libraries below it (which have code for Windows) keep theirs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fairfleet.client.device import conditions
from fairfleet.common import atomic_files
from fairfleet.common.errors import UsageError
from fairfleet.common.pki import private_files
from tests.support.fleet import HERE, Fleet, Installation

WITHOUT_UNIX = """
import builtins, os, signal, sys
real_import = builtins.__import__
MISSING = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")

def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer.startswith("fairfleet") and name.partition(".")[0] in MISSING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real_import(name, globals, locals, fromlist, level)

builtins.__import__ = guarded_import
for module, names in (
    (os, "fchmod fchown geteuid getegid getpriority setpriority killpg nice pread pwrite sysconf"),
    (signal, "SIGHUP SIGKILL SIGUSR1 SIGUSR2 pause"),
):
    for name in names.split():
        delattr(module, name)
"""
PROGRAM = f"{WITHOUT_UNIX}\nfrom fairfleet.common.cli.main import main\nmain()\n"
IMPORT_CLIENT = f"""{WITHOUT_UNIX}
import importlib, pkgutil
for part in ("common", "client"):
    package = importlib.import_module(f"fairfleet.{{part}}")
    for module in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        if "torch" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            print(module.name)
"""


def without_unix(code: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_client_can_be_imported_without_unix() -> None:
    modules = without_unix(IMPORT_CLIENT).splitlines()
    assert {"fairfleet.client.privacy.ledger", "fairfleet.common.pki.private_files"} <= {*modules}


def test_the_client_shows_its_help_without_unix() -> None:
    assert "--credentials" in without_unix(PROGRAM, "client", "--help")


def test_a_client_without_unix_trains_to_the_end(fleet: Fleet, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    python = tmp_path / "python"  # called as `python -m fairfleet.common.cli WORDS`
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{program}" "$@"\n')
    python.chmod(0o755)
    fleet.installations["a"] = Installation(python, HERE)
    fleet.init()
    fleet.start_server(rounds=2)
    fleet.start_client("a")
    fleet.start_client("b")
    assert fleet.wait_clients() == {"a": 0, "b": 0}
    fleet.prove(2)


def test_where_modes_say_nothing_a_secret_of_any_mode_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "HAS_OWNERS", False)
    secret = tmp_path / "device.fleet"
    private_files.write_private(secret, b"secret")
    secret.chmod(0o666)  # as Windows reports every file
    assert private_files.read_private(secret, "credentials") == b"secret"
    private_files.tighten(tmp_path)


def test_windows_flushes_files_but_opens_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "WINDOWS", True)
    opened: list[Path] = []
    real_open = atomic_files.os.open
    monkeypatch.setattr(
        atomic_files.os, "open", lambda path, *rest: opened.append(path) or real_open(path, *rest)
    )
    atomic_files.write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert opened == [tmp_path / "file.new"]


def test_mains_is_refused_where_no_file_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "SYSTEM_DEVICES", tmp_path / "missing")
    with pytest.raises(UsageError, match=r"--when run=COMMAND"):
        conditions.condition("mains")
