"""The file of a model as it is exported: the stored one, with more metadata in its header.

Only the header is held in memory. The tensors follow it byte for byte as they are stored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from fairfleet.common.errors import NotKept

LENGTH = struct.Struct("<Q")  # of the header, at the beginning of a safetensors file


class ExportedModel:
    """An open file of the state directory, read with a header of its own."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Open a file; `metadata` replaces or joins that in it. Close it with `close`.

        Raises FileNotFoundError, and NotKept for a file that is damaged.
        """
        self._file = path.open("rb")
        try:
            (length,) = LENGTH.unpack(self._file.read(LENGTH.size))
            if length > path.stat().st_size:
                raise ValueError(f"a header of {length} bytes is longer than the file")
            header = json.loads(self._file.read(length))
            header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
        except (struct.error, ValueError, AttributeError, TypeError) as error:
            self._file.close()
            raise NotKept(
                f"{path} is damaged: it has no header of a safetensors file. Restore it from a "
                "backup of the state directory"
            ) from error
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = LENGTH.pack(len(text)) + text
        self.size_bytes = len(self._header) + path.stat().st_size - LENGTH.size - length

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the bytes of the file, at most so many at a time."""
        for first in range(0, len(self._header), size):
            yield self._header[first : first + size]
        while data := self._file.read(size):
            yield data

    def close(self) -> None:
        """Close the file."""
        self._file.close()
