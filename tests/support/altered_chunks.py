"""Updates whose chunks are altered before they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.support.device import Device


def send_altered(
    device: Device, change: Callable[[list[Chunk]], list[Chunk]], **fields: Any
) -> pb.Receipt:
    """Send an update after `change` altered its chunks, and return the receipt."""
    chunks, encoded = device.encode()
    return device.send(device.open(encoded, **fields).upload, change(chunks))


def flip_one_bit(chunks: list[Chunk]) -> list[Chunk]:
    """Flip one bit in the data of the second chunk."""
    chunks[1].data = bytes([chunks[1].data[0] ^ 1]) + chunks[1].data[1:]
    return chunks
