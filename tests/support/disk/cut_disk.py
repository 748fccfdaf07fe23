"""A simulated disk that keeps only what was fsynced: file contents and names in folders.

It is fed with the calls that a process made (`syscalls`) and returns at any moment what a power cut
would leave: only what is certain, or any part of the rest, in any order. It promises less than any
file system in use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.disk.syscalls import FILES, NAMES, OPENS, Call, Moment

SECTOR = 512
MAPPED = "-shm"  # SQLite's index of its log, which SQLite rebuilds after a crash


@dataclass(frozen=True)
class Written:
    offset: int
    data: bytes

    def sectors(self) -> Iterator[Written]:
        """Yield the sectors of a write: each reaches the disk completely or not at all."""
        start = self.offset
        while start < self.offset + len(self.data):
            end = min(start // SECTOR * SECTOR + SECTOR, self.offset + len(self.data))
            yield Written(start, self.data[start - self.offset : end - self.offset])
            start = end


@dataclass(frozen=True)
class Resized:
    size: int

    def sectors(self) -> Iterator[Resized]:
        yield self


Named = Mapping[str, "File | Folder | None"]  # names that are added or removed; a rename does both
Chosen = Callable[[], bool]  # whether an uncertain change survives


@dataclass
class File:
    changes: list[Written | Resized] = field(default_factory=list)
    certain: int = 0  # the number of surviving changes

    def content(self, survives: Chosen) -> bytes:
        data = bytearray()
        for index, change in enumerate(self.changes):
            parts = (
                [change]
                if index < self.certain
                else [part for part in change.sectors() if survives()]
            )
            for part in parts:
                _apply(data, part)
        return bytes(data)


@dataclass
class Folder:
    changes: list[Named] = field(default_factory=list)
    certain: int = 0

    def names(self, survives: Chosen) -> dict[str, File | Folder]:
        names_now: dict[str, File | Folder | None] = {}
        for index, change in enumerate(self.changes):
            if index < self.certain or survives():
                names_now |= change
        return {name: what for name, what in names_now.items() if what is not None}


@dataclass
class Opened:
    what: File | Folder
    path: str
    position: int = 0


def always() -> bool:
    return True


def never() -> bool:
    return False


class CutDisk:
    """The disk of the folder `root`, which exists, is empty, and whose own name is certain."""

    def __init__(self, root: Path, ignored: Callable[[str], bool] = lambda path: False) -> None:
        """`ignored` names paths whose syncs are ignored, to test whether that is detected."""
        self._prefix = f"{root}/"
        self._ignored = ignored
        self._root = Folder()
        self._opened: dict[int, Opened] = {}
        self._syncing: dict[int, tuple[Opened, int]] = {}  # by call: how much it will make certain
        self.renamed: dict[str, bytes] = {}  # the content of a file when it got its name
        self.changed = True  # possibly present at the last moment

    # ---- recorded calls --------------------------------------------------------------------------

    def restarted(self) -> None:
        """Continue with another process."""
        self._opened.clear()
        self._syncing.clear()

    def take(self, moment: Moment) -> None:
        call = moment.call
        self.changed = moment.ends and call.name not in ("read", "lseek", "fcntl", "close", "mmap")
        if moment.begins and call.name in ("fsync", "fdatasync"):
            self._sync_begins(call)
        if moment.begins and call.name == "close":
            self._opened.pop(call.numbers()[0], None)
        if moment.ends:
            self._happened(call)

    def _happened(self, call: Call) -> None:
        if call.name in OPENS:
            self._open(call)
        elif call.name in NAMES:
            self._rename(call)
        elif call.name in ("fsync", "fdatasync"):
            self._sync_ends(call)
        elif numbers := call.numbers():
            opened = self._opened.get(numbers[-2] if call.name == "mmap" else numbers[0])
            if opened is not None:
                assert call.name in FILES, (
                    f"{call.name} of {opened.path}: this disk does not know it"
                )
                self._use(call, opened, numbers)

    def _open(self, call: Call) -> None:
        path = self._inside(call.strings()[0])
        self._opened.pop(call.result, None)
        if path is None:
            return
        assert "O_APPEND" not in call.given, f"{path}: appending is not known here"
        what = self._find(path)
        if what is None:
            assert "O_CREAT" in call.given, f"{path} was opened, and is not there"
            what = File()
            self._name({path: what})
        self._opened[call.result] = Opened(what, path)
        if "O_TRUNC" in call.given and isinstance(what, File):
            what.changes.append(Resized(0))

    def _rename(self, call: Call) -> None:
        paths = [self._inside(text) for text in call.strings()]
        if paths == [None] * len(paths):
            return
        first = paths[0]
        assert first is not None
        if call.name.startswith("mkdir"):
            self._name({first: Folder()})
        elif call.name.startswith("unlink"):
            self._name({first: None})
        else:
            what, last = self._find(first), paths[-1]
            assert isinstance(what, File)
            assert last is not None
            self._name({first: None, last: what})
            self.renamed[last] = what.content(always)

    def _name(self, change: dict[str, File | Folder | None]) -> None:
        (folder,) = {
            path.rpartition("/")[0] for path in change
        }  # both names of a rename are in one folder
        where = self._find(folder)
        assert isinstance(where, Folder)
        where.changes.append({path.rpartition("/")[2]: what for path, what in change.items()})

    def _use(self, call: Call, opened: Opened, numbers: list[int]) -> None:
        what = opened.what
        if call.name == "mmap":
            writable = "PROT_WRITE" in call.given and "MAP_SHARED" in call.given
            assert not writable or opened.path.endswith(MAPPED), (
                f"{opened.path} is written through a map"
            )
        elif call.name == "dup" or (call.name == "fcntl" and "F_DUPFD" in call.given):
            self._opened[call.result] = opened
        elif call.name == "lseek":
            opened.position = call.result
        elif call.name == "read":
            opened.position += call.result
        elif isinstance(what, File) and call.name == "ftruncate":
            what.changes.append(Resized(numbers[1]))
        elif isinstance(what, File) and call.name in ("write", "pwrite64"):
            offset = numbers[2] if call.name == "pwrite64" else opened.position
            what.changes.append(Written(offset, call.strings()[0][: call.result]))
            opened.position += call.result if call.name == "write" else 0

    def _sync_begins(self, call: Call) -> None:
        if opened := self._opened.get(call.numbers()[0]):
            self._syncing[id(call)] = (opened, len(opened.what.changes))

    def _sync_ends(self, call: Call) -> None:
        """Mark what the sync made certain; changes made while it ran may be missing."""
        if begun := self._syncing.pop(id(call), None):
            opened, changes = begun
            if not self._ignored(opened.path):
                opened.what.certain = max(opened.what.certain, changes)

    def _inside(self, path: bytes) -> str | None:
        """Return a path relative to the root, which is the empty path; None if it is outside."""
        text = f"{path.decode()}/"
        return (
            text.removeprefix(self._prefix).rstrip("/") if text.startswith(self._prefix) else None
        )

    def _find(self, path: str) -> File | Folder | None:
        what: File | Folder | None = self._root
        for name in filter(None, path.split("/")):
            what = what.names(always).get(name) if isinstance(what, Folder) else None
        return what

    # ---- the state after a cut -------------------------------------------------------------------

    def files(self, names: Chosen, contents: Chosen) -> dict[str, bytes | None]:
        """Return what is certain and the chosen part of the rest, by path; None for folders."""
        chosen_files: dict[str, bytes | None] = {}

        def walk(folder: Folder, path: str) -> None:
            for name, what in folder.names(names).items():
                if isinstance(what, Folder):
                    chosen_files[path + name] = None
                    walk(what, f"{path}{name}/")
                elif not name.endswith(MAPPED):
                    chosen_files[path + name] = what.content(contents)

        walk(self._root, "")
        return chosen_files


def coin(seed: int) -> Chosen:
    draw = random.Random(seed)
    return lambda: draw.random() < 0.5


def lay_out(files: Mapping[str, bytes | None], root: Path) -> None:
    for path, content in files.items():
        if content is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(content)


def _apply(data: bytearray, change: Written | Resized) -> None:
    end = change.size if isinstance(change, Resized) else change.offset + len(change.data)
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    if isinstance(change, Resized):
        del data[change.size :]
    else:
        data[change.offset : end] = change.data
