"""An update told by how it differs from multiples of an earlier one, the *base*, which both sides hold.

For codecs that leave most values out: what is left out is then about what it was last time, not zero. Each block of
values has a multiple of its own, the one that leaves the least to be told, so a base that says nothing of an update
does no harm. The products are rounded before they are added: every machine gets the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import CHUNK_BYTES, Buffer, Codec
from fairfleet.common.codecs.floats import BF16_LARGEST, from_bf16, to_bf16
from fairfleet.common.codecs.names import codec_named, needs
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

BLOCK = 256  # values that share a multiple: about the weights of a neuron, which grow and shrink together


def is_predicted(name: str) -> bool:
    """Whether updates in this codec are worth a base: those that leave values out, or nearly, and have room."""
    if needs(name).isdisjoint({"topk", "topsign"}):
        return False
    codec = codec_named(name)
    elements = codec.elements_per_chunk
    return codec.largest(elements) + scale_bytes(elements) <= CHUNK_BYTES


def scale_bytes(elements: int) -> int:
    """What the multiples of a chunk take, ahead of the codec's own bytes."""
    return 2 * -(-elements // BLOCK)


def fitting_scales(values: Vector, base: Vector) -> bytes:
    """For each block the multiple of the base that is nearest to the values; 0 where that is no number."""
    wide = base.astype(np.float64)  # whose squares are not lost
    with np.errstate(all="ignore"):
        scales = _sums_of_products(values, wide) / _sums_of_products(wide, wide)
    scales[~(np.abs(scales) <= BF16_LARGEST)] = 0
    return to_bf16(scales.astype(np.float32)).tobytes()


def _sums_of_products(values: NDArray[np.floating[Any]], wide: NDArray[np.float64]) -> NDArray[np.float64]:
    """One for each block; the last may be shorter."""
    whole = len(wide) - len(wide) % BLOCK
    blocks = np.einsum("ij,ij->i", values[:whole].reshape(-1, BLOCK), wide[:whole].reshape(-1, BLOCK))
    return np.append(blocks, values[whole:] @ wide[whole:]) if whole < len(wide) else blocks


def predicted(scales: Buffer, base: Vector) -> Vector:
    """What these multiples make of the base."""
    multiples = np.empty(len(scales) // 2, np.float32)
    from_bf16(scales, multiples)
    if not np.isfinite(multiples).all():
        raise BadRequest("a multiple of the base is not a finite number")
    with np.errstate(over="ignore"):
        return np.repeat(multiples, BLOCK)[: len(base)] * base


def decode_predicted(codec: Codec, data: Buffer, base: Vector, out: Vector) -> None:
    """Fills `out` with multiples of the base and what the codec adds: finite or not, which the caller is to see."""
    ahead = scale_bytes(len(out))
    if len(data) < ahead:
        raise BadRequest(
            f"{len(out)} values with a base begin with {ahead} bytes of multiples; the chunk has {len(data)}"
        )
    prediction = predicted(data[:ahead], base)
    codec.decode(data[ahead:], out)
    with np.errstate(over="ignore", invalid="ignore"):
        out += prediction
