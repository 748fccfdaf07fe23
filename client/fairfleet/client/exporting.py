"""A model from a server into a file that is whole, or not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fairfleet.common.errors import Corrupted, UsageError
from fairfleet.proto.v1 import operator_pb2 as pb


class Saved(NamedTuple):
    version: int
    size_bytes: int


def save_model(
    chunks: Iterable[pb.FileChunk], output: Path, progress: Callable[[int, int], None] = lambda done, size: None
) -> Saved:
    """Writes beside, then renames. `progress` hears how many bytes of how many are here."""
    beside = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            saved = _write(chunks, file, progress)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)
    return saved


def _write(chunks: Iterable[pb.FileChunk], file: BinaryIO, progress: Callable[[int, int], None]) -> Saved:
    done, saved = 0, Saved(0, -1)
    for chunk in chunks:
        if chunk.offset_bytes != done:
            raise Corrupted(f"the server sent byte {chunk.offset_bytes:,} after {done:,}; export again")
        file.write(chunk.data)
        done += len(chunk.data)
        saved = Saved(chunk.version, chunk.size_bytes)
        progress(done, saved.size_bytes)
    if done != saved.size_bytes:
        raise Corrupted(f"the model ended after {done:,} bytes of {saved.size_bytes:,}; export again")
    return saved
