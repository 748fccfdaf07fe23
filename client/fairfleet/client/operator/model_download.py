"""Save a model from a server to a file.

The file is written under a temporary name and then renamed, so it is complete or does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fairfleet.common.atomic_files import TEMP_SUFFIX, Sync, write_atomically
from fairfleet.common.errors import Corrupted, UsageError
from fairfleet.proto.v1 import operator_pb2 as pb


class DownloadedModel(NamedTuple):
    """Which version was saved, and the size of its file."""

    version: int
    size_bytes: int


def save_model(
    chunks: Iterable[pb.FileChunk],
    output: Path,
    progress: Callable[[int, int], None] = lambda done, size: None,
) -> DownloadedModel:
    """Write the chunks of a model to a file, which replaces an existing one.

    `progress` is called with the bytes received and the bytes of the whole file. Raises Corrupted
    for a stream with a gap or an early end, and UsageError if the file cannot be written.
    """
    saved = DownloadedModel(0, -1)

    def receive(temp_path: Path) -> None:
        nonlocal saved
        with temp_path.open("wb") as file:
            saved = _write(chunks, file, progress)

    try:
        # Two exports to the same file at once must not write to the same temporary file.
        suffix = f".{os.getpid()}{TEMP_SUFFIX}"
        write_atomically(output, receive, sync=Sync.FILE, temp_suffix=suffix)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    return saved


def _write(
    chunks: Iterable[pb.FileChunk], file: BinaryIO, progress: Callable[[int, int], None]
) -> DownloadedModel:
    done, saved = 0, DownloadedModel(0, -1)
    for chunk in chunks:
        if chunk.offset_bytes != done:
            raise Corrupted(
                f"the server sent byte {chunk.offset_bytes:,}, expected byte {done:,}; export again"
            )
        file.write(chunk.data)
        done += len(chunk.data)
        saved = DownloadedModel(chunk.version, chunk.size_bytes)
        progress(done, saved.size_bytes)
    if done != saved.size_bytes:
        raise Corrupted(
            f"the model ended after {done:,} bytes of {saved.size_bytes:,}; export again"
        )
    return saved
