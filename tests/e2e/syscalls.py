"""What a process did to the files in a folder, as strace saw it: every call with the moments it began and ended.

At this level nothing escapes but writes through memory maps: Python, SQLite and numpy all end in the same calls. A
call that could change a file and is not known here is an error, so is a map that could write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat")
OPENS = ("openat", "open")
FILES = ("write", "pwrite64", "ftruncate", "fsync", "fdatasync", "lseek", "read", "dup", "fcntl", "close", "mmap")
UNKNOWN = ("creat", "writev", "pwritev", "pwritev2", "truncate", "fallocate", "link", "linkat", "rmdir", "dup2", "dup3")
UNKNOWN_TOO = ("sendfile", "copy_file_range", "sync_file_range", "readv")
TRACED = (*NAMES, *OPENS, *FILES, *UNKNOWN, *UNKNOWN_TOO)

LINE = re.compile(r"(?P<thread>\d+) +(?P<at>\d+\.\d+) (?P<rest>.*)")
WHOLE = re.compile(r"(?P<name>\w+)\((?P<given>.*)\)\s+= (?P<result>-?\w+|\?).*")
BEGUN = re.compile(r"(?P<name>\w+)\((?P<given>.*) <unfinished \.\.\.>")
ENDED = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<given>.*)\)\s+= (?P<result>-?\w+|\?).*")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def traced(output: Path) -> list[str]:
    """What stands before a command whose calls are to be seen. The command stays the caller's own child."""
    return ["strace", "-D", "-f", "--seccomp-bpf", "-ttt", "-xx", "-s", "100000000", "-e", "raw=read",
            "-e", f"trace={','.join(TRACED)}", "-o", str(output), "--"]  # fmt: skip


@dataclass
class Call:
    name: str
    given: str
    result: int = -1

    def strings(self) -> list[bytes]:
        return [bytes.fromhex(text.replace("\\x", "")) for text in STRING.findall(self.given)]

    def numbers(self) -> list[int]:
        """Its plain arguments, in their order; what is a word or a string is left out."""
        words = STRING.sub("", self.given).split(", ")
        return [int(word, 0) for word in words if re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", word)]


@dataclass(frozen=True)
class Moment:
    """A call begins, or ends, or both: then nothing came between."""

    at: float  # unix seconds; for a call that begins and ends here, when it began
    call: Call
    begins: bool
    ends: bool


def moments(trace: Path) -> Iterator[Moment]:
    """In the order in which strace saw them. Calls that failed, or never ended, never happened."""
    under_way: dict[str, Call] = {}
    found: list[Moment] = []
    for line in trace.read_text(encoding="ascii").splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, f"strace said something else: {line[:200]}"
        if match["rest"].startswith(("+++", "---")):
            continue
        thread, at, rest = match["thread"], float(match["at"]), match["rest"]
        if whole := WHOLE.fullmatch(rest):
            found.append(Moment(at, Call(whole["name"], whole["given"], _number(whole["result"])), True, True))
        elif begun := BEGUN.fullmatch(rest):
            under_way[thread] = Call(begun["name"], begun["given"])
            found.append(Moment(at, under_way[thread], True, False))
        elif ended := ENDED.fullmatch(rest):
            call = under_way.pop(thread)
            call.given, call.result = call.given + ended["given"], _number(ended["result"])
            found.append(Moment(at, call, False, True))
        else:
            raise AssertionError(f"strace said something else: {line[:200]}")
    return iter([moment for moment in found if moment.call.result >= 0])


def _number(text: str) -> int:
    return int(text, 0) if text != "?" else -1
