"""Delta-code an update against multiples of an earlier one, the *base*, which both sides have.

This is for codecs that leave out most values: a value that is left out then stays about what it
was last time, instead of becoming zero. Each block of values has its own multiple, the one that
leaves the smallest difference, so an unrelated base does no harm. The products are rounded before
they are added, so every machine gets the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import CHUNK_BYTES, Buffer, Codec
from fairfleet.common.codecs.floats import BF16_LARGEST, from_bf16, to_bf16
from fairfleet.common.codecs.registry import codec_named, needs
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

# Values that share a multiple: about the weights of a neuron, which grow and shrink together.
BLOCK = 256


def is_predicted(name: str) -> bool:
    """Return whether updates in this codec are delta-coded.

    These are codecs that leave values out, or nearly, and whose chunks have room for the
    multiples.
    """
    if needs(name).isdisjoint({"topk", "topsign"}):
        return False
    codec = codec_named(name)
    elements = codec.elements_per_chunk
    return codec.largest(elements) + scale_bytes(elements) <= CHUNK_BYTES


def scale_bytes(elements: int) -> int:
    """Return the size of a chunk's multiples, which precede the codec's own bytes."""
    return 2 * -(-elements // BLOCK)


def fitting_scales(values: Vector, base: Vector) -> bytes:
    """Return, for each block, the multiple of the base that is nearest to the values, as bf16.

    It is 0 if there is no such finite number.
    """
    wide = base.astype(np.float64)  # squares of small values would become 0 in float32
    with np.errstate(all="ignore"):
        scales = _sums_of_products(values, wide) / _sums_of_products(wide, wide)
    scales[~(np.abs(scales) <= BF16_LARGEST)] = 0
    return to_bf16(scales.astype(np.float32)).tobytes()


def _sums_of_products(
    values: NDArray[np.floating[Any]], wide: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the inner product of each block. The last block may be shorter."""
    full_end = len(wide) - len(wide) % BLOCK
    blocks = np.einsum(
        "ij,ij->i", values[:full_end].reshape(-1, BLOCK), wide[:full_end].reshape(-1, BLOCK)
    )
    return (
        np.append(blocks, values[full_end:] @ wide[full_end:]) if full_end < len(wide) else blocks
    )


def predicted(scales: Buffer, base: Vector) -> Vector:
    """Return the base times its multiples. Raises BadRequest if a multiple is not finite."""
    multiples = np.empty(len(scales) // 2, np.float32)
    from_bf16(scales, multiples)
    if not np.isfinite(multiples).all():
        raise BadRequest("a multiple of the base is not a finite number")
    with np.errstate(over="ignore"):
        return np.repeat(multiples, BLOCK)[: len(base)] * base


def decode_predicted(codec: Codec, data: Buffer, base: Vector, out: Vector) -> None:
    """Fill `out` with multiples of the base plus what the codec decodes.

    The sum may be infinite; the caller has to check it. Raises BadRequest if the data is wrong.
    """
    scales_end = scale_bytes(len(out))
    if len(data) < scales_end:
        raise BadRequest(
            f"{len(out)} values with a base begin with {scales_end} bytes of multiples; "
            f"the chunk has {len(data)}"
        )
    prediction = predicted(data[:scales_end], base)
    codec.decode(data[scales_end:], out)
    with np.errstate(over="ignore", invalid="ignore"):
        out += prediction
