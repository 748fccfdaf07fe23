"""The client's ledger of releases: what has left this machine, and what it cost.

A release is appended and fsynced before it is sent. A client that is killed in between has charged
for something that it may not have sent; nothing ever reduces a charge. The ledger is the client's
own: it counts over all federations, because they train on the same data. Several processes may use
one file at the same time; each append holds a lock on it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from filelock import lock_descriptor

from fairfleet.common.atomic_files import fsync_path
from fairfleet.common.errors import StateDirError

log = logging.getLogger(__name__)

FILE = "releases.jsonl"
Kind = Literal["update", "evaluation", "trial"]
UNPROTECTED = "without noise"  # the `what` of a kind of release that is sent as it is


class LedgerEntry(NamedTuple):
    """Something that leaves this machine."""

    federation: str  # its id, or the name that an older server gives
    kind: Kind
    number: int  # of the round or the model's version
    what: str  # a digest of what is sent, the same whenever the same is sent again
    cost: float  # (sensitivity / noise)^2; inf: without noise; 0: not covered by epsilon


class ReleaseLedger:
    """All releases so far, in a file that only grows."""

    def __init__(self, folder: Path) -> None:
        """Read the ledger of a client's folder; raise StateDirError if it is damaged."""
        self._path, self._lock = folder / FILE, threading.Lock()
        self._read_bytes = 0
        self._known: set[tuple[str, Kind, str]] = set()
        self.costs: defaultdict[str, float] = defaultdict(float)  # by federation
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
        and the release must not be sent. Raises StateDirError if the ledger cannot be written.
        """
        if _key(release) in self._known:
            return False
        with self._lock, self._opened() as file:
            if _key(release) in self._known:  # recorded by another process meanwhile
                return False
            check(self.total + release.cost)
            line = json.dumps({**release._asdict(), "unix_seconds": round(time.time(), 3)})
            self._append(file, line.encode() + b"\n")
            self._add(release)
        return True

    def _append(self, file: BinaryIO, line: bytes) -> None:
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise StateDirError(
                f"cannot record in {self._path} what leaves this machine ({error.strerror}), so "
                "nothing is sent. Make room on the disk and restart the client."
            ) from error
        self._read_bytes += len(line)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Open and lock the file, after reading what other processes appended."""
        try:
            is_new = not self._path.exists()
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            file = open(os.open(self._path, flags, 0o600), "r+b")  # noqa: SIM115  # closed below
        except OSError as error:
            raise StateDirError(
                f"cannot open {self._path}: {error.strerror}. This client records there what "
                "leaves the machine; give it a --state-dir that it can write to."
            ) from error
        with file:
            lock_descriptor(file.fileno())
            if is_new:
                fsync_path(self._path.parent)
            self._read(file)
            yield file

    def _read(self, file: BinaryIO) -> None:
        file.seek(self._read_bytes)
        complete, newline, rest = file.read().rpartition(b"\n")
        if rest:
            # A power cut left a part of a line. Its release was not sent: that waits for the fsync.
            file.truncate(self._read_bytes + len(complete) + len(newline))
        for line in complete.split(b"\n") if newline else ():
            self._add(self._parsed(line))
        self._read_bytes += len(complete) + len(newline)
        file.seek(0, os.SEEK_END)

    def _parsed(self, line: bytes) -> LedgerEntry:
        try:
            fields = json.loads(line)
            return LedgerEntry(**{name: fields[name] for name in LedgerEntry._fields})
        except (ValueError, KeyError, TypeError):
            raise StateDirError(
                f"{self._path} is damaged: it has the line {line[:80]!r}. Restore it from a "
                "backup. Without it, nobody knows how much this machine has released; moving it "
                "away starts the count at zero."
            ) from None

    def _add(self, release: LedgerEntry) -> None:
        self._known.add(_key(release))
        self.costs[release.federation] += release.cost
        self.counts[release.federation, release.kind, release.what != UNPROTECTED] += 1


def _key(release: LedgerEntry) -> tuple[str, Kind, str]:
    return release.federation, release.kind, release.what
