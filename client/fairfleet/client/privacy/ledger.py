"""The client's ledger of releases: what has left this machine, and what it cost.

A release is appended and fsynced before it is sent. A client that is killed in between has charged
for something that it may not have sent; nothing ever reduces a charge. The ledger is the client's
own: it counts over all federations, because they train on the same data. Several processes may use
one file at the same time; each append holds a lock on it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from filelock import lock_descriptor

from fairfleet.common.atomic_files import fsync_path
from fairfleet.common.errors import StateDirError

log = logging.getLogger(__name__)

FILE = "releases.jsonl"
Kind = Literal["update", "report", "evaluation", "trial"]
UNPROTECTED = "without noise"  # the `what` of a kind of release that is sent as it is


class LedgerUnusable(StateDirError):
    """The ledger is damaged, gone or cannot be written, so nothing may be released."""


class LedgerEntry(NamedTuple):
    """Something that leaves this machine."""

    federation: str  # its id, or the name that an older server gives
    kind: Kind
    number: int  # of the round or the model's version
    what: str  # with the number, the same only if the same is sent again
    cost: float  # (sensitivity / noise)^2; inf: without noise; 0: not covered by epsilon


class ReleaseLedger:
    """All releases so far, in a file that only grows."""

    def __init__(self, folder: Path) -> None:
        """Read the ledger of a client's folder; raise LedgerUnusable if it is damaged."""
        self._path, self._lock = folder / FILE, threading.Lock()
        self._read_bytes = 0
        self._last_line = b""  # of those that were read or written
        self._known: set[tuple[str, Kind, int, str]] = set()
        self.costs: defaultdict[str, float] = defaultdict(float)  # by federation
        # Whether this client has worked here before: what it released then is not counted.
        self.is_incomplete = not self._path.exists() and any(map(Path.is_dir, folder.glob("*")))
        self.counts: Counter[tuple[str, Kind, bool]] = Counter()  # the last: with noise
        if self._path.exists():
            with self._opened():
                pass

    @property
    def total(self) -> float:
        """The cost of all releases, over all federations."""
        return sum(self.costs.values())

    def record(
        self, release: LedgerEntry, check: Callable[[float], object] = lambda total: None
    ) -> bool:
        """Make a release durable; return whether it is new, not a repetition of the same bytes.

        `check` gets the total cost that includes a new release. If it raises, nothing is recorded,
        and the release must not be sent. Raises LedgerUnusable if the ledger cannot be written.
        """
        if _key(release) in self._known:
            return False
        with self._lock, self._opened() as file:
            if _key(release) in self._known:  # recorded by another process meanwhile
                return False
            check(self.total + release.cost)
            text = json.dumps({**release._asdict(), "unix_seconds": round(time.time(), 3)})
            line = text.encode() + b"\n"
            self._append(file, line)
            self._add(release, line)
        return True

    def _append(self, file: FileIO, line: bytes) -> None:
        """Write the rest of a line and make it durable; nothing of it stays if that fails."""
        size = os.fstat(file.fileno()).st_size
        try:
            left = memoryview(line)
            while left:  # a disk that is nearly full takes a part of it
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                # Otherwise a second try would find the line, and take it for durable.
                file.truncate(size)
            raise LedgerUnusable(
                f"cannot record in {self._path} what leaves this machine ({error.strerror}), so "
                "nothing is sent. Make room on the disk and restart the client."
            ) from error

    @contextmanager
    def _opened(self) -> Iterator[FileIO]:
        """Open and lock the file, after reading what other processes appended."""
        flags = os.O_RDWR | os.O_APPEND | (0 if self._read_bytes else os.O_CREAT)
        try:
            # Without a buffer: closing the file after a failed write would write again.
            descriptor = os.open(self._path, flags, 0o600)
            file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  # closed below
        except OSError as error:
            if self._read_bytes and isinstance(error, FileNotFoundError):
                raise self._replaced() from error
            raise LedgerUnusable(
                f"cannot open {self._path}: {error.strerror}. This client records there what "
                "leaves the machine; give it a --state-dir that it can write to."
            ) from error
        with file:
            lock_descriptor(file.fileno())
            if not self._read_bytes:  # a process that made the file may have been killed then
                fsync_path(self._path.parent)
            self._read(file)
            yield file

    def _replaced(self) -> LedgerUnusable:
        return LedgerUnusable(
            f"{self._path} was removed or replaced while this client runs, so nothing is sent. "
            "Restore it and restart the client. Without it, the count starts at zero."
        )

    def _read(self, file: FileIO) -> None:
        file.seek(self._read_bytes - len(self._last_line))
        found = file.readall()
        if not found.startswith(self._last_line):
            raise self._replaced()
        complete, newline, rest = found[len(self._last_line) :].rpartition(b"\n")
        if complete:
            os.fsync(file.fileno())  # its writer may have been killed before it did that
        for line in complete.split(b"\n") if newline else ():
            self._add(self._parsed(line), line + b"\n")
        if rest:
            self._repair_end(file, rest)

    def _repair_end(self, file: FileIO, rest: bytes) -> None:
        """Remove a part of a line that a power cut or a full disk left; end a whole one.

        The release of a part was not sent: that waits for the fsync.
        """
        try:
            entry = _entry(rest)
        except ValueError:
            log.warning("%s: removed a part of a line at its end: %r", self._path, rest[:80])
            file.truncate(self._read_bytes)
        else:
            self._append(file, b"\n")
            self._add(entry, rest + b"\n")

    def _parsed(self, line: bytes) -> LedgerEntry:
        try:
            return _entry(line)
        except ValueError:
            raise LedgerUnusable(
                f"{self._path} is damaged: it has the line {line[:80]!r}. Restore it from a "
                "backup. Without it, nobody knows how much this machine has released; moving it "
                "away starts the count at zero."
            ) from None

    def _add(self, release: LedgerEntry, line: bytes) -> None:
        self._read_bytes += len(line)
        self._last_line = line
        self._known.add(_key(release))
        self.costs[release.federation] += release.cost
        self.counts[release.federation, release.kind, release.what != UNPROTECTED] += 1


def _key(release: LedgerEntry) -> tuple[str, Kind, int, str]:
    number = 0 if release.what == UNPROTECTED else release.number
    return release.federation, release.kind, number, release.what


def _entry(line: bytes) -> LedgerEntry:
    """Return the release that a line of the file records; raise ValueError if it is damaged."""
    fields: Any = json.loads(line)
    try:
        entry = LedgerEntry(**{name: fields[name] for name in LedgerEntry._fields})
    except (KeyError, TypeError) as error:
        raise ValueError("a field is missing") from error
    texts_fit = all(isinstance(text, str) for text in (entry.federation, entry.what))
    if not texts_fit or entry.kind not in get_args(Kind) or type(entry.number) is not int:
        raise ValueError("a field has another type")
    if type(entry.cost) not in (int, float) or math.isnan(entry.cost) or entry.cost < 0:
        raise ValueError("the cost is not a number of at least 0")
    return entry
