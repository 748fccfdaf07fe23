"""Measure what each codec saves, loses and costs.

    python benchmarks/codecs.py --json
    python benchmarks/codecs.py --codec int8 --codec topk:0.1 --params 16777216

It prints one line per codec, then zlib and zstd on the raw bytes for comparison. `ratio_to_raw` is
the encoded size divided by the size of the float32 bytes. Speeds are megabytes of raw float32 per
second on one core, chunk by chunk as in a stream; the best of several counts. `relative_error` is
the norm of the error divided by the norm of the vector. The vector resembles an update: it is
normally distributed, with a different width per tensor.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import zstandard

from fairfleet.common.codecs import CHUNK_BYTES, EXAMPLES, Buffer, codec_named
from fairfleet.common.tensors import Vector

CODECS = (*EXAMPLES, "topk:0.1", "raw32+zstd", "bf16+zstd", "int4+zstd", "topk:0.01+zstd")
TENSOR = 40_000  # elements; updates differ in scale from tensor to tensor
Encode = Callable[[Vector, int], Buffer]
Decode = Callable[[Buffer, Vector], None]


def update_like(params: int) -> Vector:
    """Return a random vector that resembles an update."""
    draw = np.random.default_rng(0)
    widths = 10 ** draw.uniform(-4, -2, -(-params // TENSOR)).astype(np.float32)
    values = draw.standard_normal(params, dtype=np.float32)
    values *= np.repeat(widths, TENSOR)[:params]
    return values


def measure(
    values: Vector, elements: int, encode: Encode, decode: Decode, repeats: int
) -> dict[str, float]:
    """Return size, speeds and error of an encoding, in chunks of this many elements."""
    decoded, sizes = np.empty_like(values), 0
    encoding, decoding = float("inf"), float("inf")
    for _ in range(repeats):
        sizes, spent_encoding, spent_decoding = 0, 0.0, 0.0
        for first in range(0, len(values), elements):
            span = slice(first, first + elements)
            began = time.perf_counter()
            data = encode(values[span], first)
            between = time.perf_counter()
            decode(data, decoded[span])
            spent_decoding += time.perf_counter() - between
            spent_encoding += between - began
            sizes += len(data)
        encoding, decoding = min(encoding, spent_encoding), min(decoding, spent_decoding)
    error = float(
        np.linalg.norm((decoded - values).astype(np.float64))
        / np.linalg.norm(values.astype(np.float64))
    )
    megabytes = values.nbytes / 1e6
    return {
        "ratio_to_raw": round(sizes / values.nbytes, 5),
        "encode_megabytes_per_second": round(megabytes / encoding),
        "decode_megabytes_per_second": round(megabytes / decoding),
        "relative_error": round(error, 6),
    }


def of_codec(name: str, values: Vector, repeats: int) -> dict[str, float]:
    """Measure one of FairFleet's codecs."""
    codec = codec_named(name)
    return measure(
        values,
        codec.elements_per_chunk,
        lambda part, first: codec.encode(part, (0, first)),
        codec.decode,
        repeats,
    )


def of_library(
    pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes], values: Vector
) -> dict[str, float]:
    """Measure a compression library on the raw bytes."""

    def decode(data: Buffer, out: Vector) -> None:
        np.copyto(out, np.frombuffer(unpack(bytes(data)), np.float32))

    return measure(values, CHUNK_BYTES // 4, lambda part, _: pack(part.tobytes()), decode, 1)


def results(names: Iterable[str], params: int, repeats: int) -> Iterable[dict[str, object]]:
    """Yield one line of figures per codec and library."""
    values = update_like(params)
    for name in names:
        yield {"codec": name, **of_codec(name, values, repeats)}
    few = values[: 1 << 20]  # zlib would take minutes for more
    yield {
        "codec": "zlib on raw bytes",
        **of_library(lambda b: zlib.compress(b, 6), zlib.decompress, few),
    }
    pack, unpack = zstandard.ZstdCompressor(3), zstandard.ZstdDecompressor()
    yield {"codec": "zstd on raw bytes", **of_library(pack.compress, unpack.decompress, few)}


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--codec", action="append", help="codec to measure; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    given = parser.parse_args()
    if not given.json:
        print(
            f"{'codec':<18} {'of raw':>8} {'encode MB/s':>12} {'decode MB/s':>12} "
            f"{'relative error':>15}"
        )
    for result in results(given.codec or CODECS, given.params, given.repeats):
        if given.json:
            print(json.dumps(result), flush=True)
        else:
            name, ratio, encoding, decoding, error = result.values()
            print(
                f"{name:<18} {ratio:>8.4f} {encoding:>12} {decoding:>12} {error:>15.6f}", flush=True
            )


if __name__ == "__main__":
    main()
