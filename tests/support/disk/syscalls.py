"""The changes of a process to the files in a folder, as strace recorded them.

Every call has the moments at which it began and ended. Only writes through memory maps are
invisible: Python, SQLite and numpy all use the same calls. An unknown call that could change a file
is an error, as is a map that could write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat")
OPENS = ("openat", "open")
FILES = (
    "write",
    "pwrite64",
    "ftruncate",
    "fsync",
    "fdatasync",
    "lseek",
    "read",
    "dup",
    "fcntl",
    "close",
    "mmap",
)
UNKNOWN = (
    "creat",
    "writev",
    "pwritev",
    "pwritev2",
    "truncate",
    "fallocate",
    "link",
    "linkat",
    "rmdir",
    "dup2",
    "dup3",
)
UNKNOWN_TOO = ("sendfile", "copy_file_range", "sync_file_range", "readv")
TRACED = (*NAMES, *OPENS, *FILES, *UNKNOWN, *UNKNOWN_TOO)

LINE = re.compile(r"(?P<thread>\d+) +(?P<at>\d+\.\d+) (?P<rest>.*)")
WHOLE = re.compile(r"(?P<name>\w+)\((?P<given>.*)\)\s+= (?P<result>-?\w+|\?).*")
BEGUN = re.compile(r"(?P<name>\w+)\((?P<given>.*) <unfinished \.\.\.>")
ENDED = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<given>.*)\)\s+= (?P<result>-?\w+|\?).*")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def traced(output: Path) -> list[str]:
    """Return the prefix of a command whose calls are recorded.

    The command stays the caller's own child.
    """
    return [
        "strace",
        "-D",
        "-f",
        "--seccomp-bpf",
        "-ttt",
        "-xx",
        "-s",
        "100000000",
        "-e",
        "raw=read",
        "-e",
        f"trace={','.join(TRACED)}",
        "-o",
        str(output),
        "--",
    ]


@dataclass
class Call:
    name: str
    given: str
    result: int = -1

    def strings(self) -> list[bytes]:
        return [bytes.fromhex(text.replace("\\x", "")) for text in STRING.findall(self.given)]

    def numbers(self) -> list[int]:
        """Return the plain arguments in order, without words and strings."""
        words = STRING.sub("", self.given).split(", ")
        return [int(word, 0) for word in words if re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", word)]


@dataclass(frozen=True)
class Moment:
    """The begin of a call, its end, or both if nothing came between."""

    at: float  # Unix seconds; for a call that begins and ends at this moment, its begin
    call: Call
    begins: bool
    ends: bool


def moments(trace: Path) -> Iterator[Moment]:
    """Yield moments in the order in which strace saw them, without failed or unfinished calls."""
    under_way: dict[str, Call] = {}
    moments_seen: list[Moment] = []
    for line in trace.read_text(encoding="ascii").splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, f"unexpected line of strace: {line[:200]}"
        if match["rest"].startswith(("+++", "---")):
            continue
        thread, time, rest = match["thread"], float(match["at"]), match["rest"]
        if complete_call := WHOLE.fullmatch(rest):
            moments_seen.append(
                Moment(
                    time,
                    Call(
                        complete_call["name"],
                        complete_call["given"],
                        _number(complete_call["result"]),
                    ),
                    True,
                    True,
                )
            )
        elif begun := BEGUN.fullmatch(rest):
            under_way[thread] = Call(begun["name"], begun["given"])
            moments_seen.append(Moment(time, under_way[thread], True, False))
        elif ended := ENDED.fullmatch(rest):
            call = under_way.pop(thread)
            call.given, call.result = call.given + ended["given"], _number(ended["result"])
            moments_seen.append(Moment(time, call, False, True))
        else:
            raise AssertionError(f"unexpected line of strace: {line[:200]}")
    return iter([moment for moment in moments_seen if moment.call.result >= 0])


def _number(text: str) -> int:
    return int(text, 0) if text != "?" else -1
