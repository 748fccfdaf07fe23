"""Detect messages in gRPC's own compression, which no FairFleet server accepts.

The server disables gRPC's decompression, because a few bytes could become gigabytes before any
limit is checked. A compressed message therefore arrives unchanged, and is not valid protobuf.
"""

from __future__ import annotations

from fairfleet.common.errors import CompressedMessage

GZIP = b"\x1f\x8b"
DEFLATE = tuple(bytes([0x78, level]) for level in (0x01, 0x5E, 0x9C, 0xDA))


def compression_of(message: bytes) -> str:
    """Return the name of the compression of a message, or an empty string.

    >>> compression_of(bytes.fromhex("1f8b0800")), compression_of(bytes.fromhex("789cec"))
    ('gzip', 'deflate')
    >>> compression_of(b"other")
    ''
    """
    if message[:2] == GZIP:
        return "gzip"
    return "deflate" if message[:2] in DEFLATE else ""


def refuse_compressed(message: bytes) -> None:
    """Raise CompressedMessage if a message that is not protobuf is compressed by gRPC."""
    if kind := compression_of(message):
        raise CompressedMessage(
            f"the message is compressed with {kind}; this server takes no compression of gRPC's "
            "own. Switch it off for this channel or call (grpc-encoding: identity): updates are "
            "compressed by their codec."
        )
