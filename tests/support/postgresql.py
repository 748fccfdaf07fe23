"""A real PostgreSQL server on loopback, from Debian's package."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import until


def binaries() -> Path:
    """Return the folder of PostgreSQL's programs, or skip the test."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs and (which := shutil.which("initdb")):
        programs = [Path(which)]
    if not programs:
        pytest.skip("PostgreSQL is not installed; scripts/install-test-packages does it on Debian")
    return programs[-1].parent


class PostgreSQL:
    """One server; each test gets a separate database."""

    def __init__(self, folder: Path, port: int, user: str | None) -> None:
        self._bin, self._folder, self._port, self._user = binaries(), folder, port, user

    @contextlib.contextmanager
    def running(self) -> Iterator[PostgreSQL]:
        """Run the server while the block runs."""
        data = str(self._folder / "data")
        self._run("initdb", "-D", data, "-U", "tester", "--auth=trust", "--no-sync")
        options = ["-h", "127.0.0.1", "-p", str(self._port), "-k", str(self._folder)]
        process = subprocess.Popen(
            [self._bin / "postgres", "-D", data, *options],
            user=self._user,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(self._answers, "PostgreSQL to start", 60)
            yield self
        finally:
            process.send_signal(signal.SIGQUIT)  # at once, without waiting for connections
            process.wait(30)

    def new_database(self) -> str:
        """Create an empty database, and return its URL."""
        name = f"test_{secrets.token_hex(6)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", "tester", name)
        return f"postgresql+psycopg://tester@127.0.0.1:{self._port}/{name}"

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0 and self._ready()

    def _ready(self) -> bool:
        command = [self._bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        return subprocess.run(command, check=False, cwd="/").returncode == 0

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [self._bin / program, *words], user=self._user, check=True, capture_output=True, cwd="/"
        )


@contextlib.contextmanager
def postgresql_server() -> Iterator[PostgreSQL]:
    """Start a server. PostgreSQL refuses to run as root, who runs it as the user postgres."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    binaries()
    user = None
    with tempfile.TemporaryDirectory(prefix="pg") as name:
        if os.getuid() == 0:
            user = "postgres"
            os.chown(name, pwd.getpwnam(user).pw_uid, -1)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with PostgreSQL(Path(name), port, user).running() as server:
            yield server
