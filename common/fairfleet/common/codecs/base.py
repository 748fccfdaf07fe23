"""What every codec promises, and the limits of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

CHUNK_BYTES = 1 << 20
CHUNK_ELEMENTS = 1 << 20  # a small chunk may stand for many elements, but never for more than these
BATCH_ELEMENTS = 1 << 15  # worked on at once, so that what a step leaves is still in the cache for the next

Buffer = bytes | memoryview
Bytes = NDArray[np.uint8]
Seed = Sequence[int]


class Codec(Protocol):
    """Of consecutive float32 values. A chunk decodes by itself; one codec object serves all threads."""

    @property
    def name(self) -> str: ...

    @property
    def lossy(self) -> bool:
        """Whether what is decoded can differ from what was encoded."""

    @property
    def elements_per_chunk(self) -> int:
        """So many elements encode to at most CHUNK_BYTES."""

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """`values` are finite. A codec that rounds at random takes the same turns for the same seed."""

    def decode(self, data: Buffer, out: Vector) -> None:
        """Fills `out`; raises BadRequest where `data` is not the encoding of len(out) values."""

    def largest(self, elements: int) -> int:
        """No encoding of so many elements has more bytes."""


def check_length(name: str, data: Buffer, elements: int, expected: int) -> None:
    if len(data) != expected:
        raise BadRequest(f"{elements} values in {name} take {expected} bytes; the chunk has {len(data)}")


def fitting_elements(largest: Callable[[int], int]) -> int:
    """The largest power of two of elements whose encoding is sure to fit a chunk."""
    elements = CHUNK_ELEMENTS
    while largest(elements) > CHUNK_BYTES:
        elements //= 2
    return elements
