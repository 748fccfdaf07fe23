"""The interface of every codec, and the limits of a chunk.

A codec relies on finite input. It guarantees that a chunk decodes without any other chunk, and
that wrong bytes raise BadRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

CHUNK_BYTES = 1 << 20
CHUNK_ELEMENTS = 1 << 20  # the most elements of a chunk, however few bytes they take
# Elements processed at once, so that the result of a step is still in the cache for the next one.
BATCH_ELEMENTS = 1 << 15

Buffer = bytes | memoryview
Bytes = NDArray[np.uint8]
Seed = Sequence[int]


class Codec(Protocol):
    """An encoding of consecutive float32 values.

    A chunk decodes without the others. One codec object serves all threads.
    """

    @property
    def name(self) -> str:
        """Return the name, from which `codec_named` makes the same codec."""

    @property
    def lossy(self) -> bool:
        """Return whether decoded values can differ from the encoded ones."""

    @property
    def is_unbiased(self) -> bool:
        """Return whether decoded values equal the encoded ones on average over the seeds."""

    @property
    def elements_per_chunk(self) -> int:
        """Return a number of elements that always encode to at most CHUNK_BYTES."""

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Return the encoding of finite values.

        A codec that rounds at random makes the same choices for the same seed.
        """

    def decode(self, data: Buffer, out: Vector) -> None:
        """Fill `out` with the decoded values.

        Raises BadRequest if `data` is not an encoding of len(out) values.
        """

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""


def check_length(name: str, data: Buffer, elements: int, expected: int) -> None:
    """Raise BadRequest if the data does not have the expected number of bytes."""
    if len(data) != expected:
        raise BadRequest(
            f"{elements} values in {name} take {expected} bytes; the chunk has {len(data)}"
        )


def fitting_elements(largest: Callable[[int], int]) -> int:
    """Return the largest power of two of elements whose encoding always fits a chunk."""
    elements = CHUNK_ELEMENTS
    while largest(elements) > CHUNK_BYTES:
        elements //= 2
    return elements
