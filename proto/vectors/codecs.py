"""Writes codecs.json in this folder: for each codec some values, their bytes, and what the bytes
decode to.

    python proto/vectors/codecs.py

All three are hexadecimal, the values as little-endian float32. What a reader must do is in `data`
and `decoded`. The `data` of int8 and int4 is one of many right ones: it depends on the random
numbers (numpy's SFC64, seed [7]). That of +zstd depends on the version of zstd. Under `steady` are
the codecs that models are rounded to: there the data, too, are the only right ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fairfleet.common.codecs import EXAMPLES, STEADY, Codec, codec_named

INPUTS = {
    "260 values over two blocks": [(i * 37 % 101 - 50) / 8 * 2.0 ** -(i // 64) for i in range(260)],
    "an odd number": [1.5, -2.0, 0.0],
    "zeros": [0.0] * 9,
    "very large and very small": [3.0e38, -3.0e38, 1.0e-40, 7.0e4],
}


def vectors(codecs: Iterable[Codec]) -> list[dict[str, str]]:
    """Return the values, bytes and decoded values of every codec and input, in hexadecimal."""
    entries = []
    for codec in codecs:
        for description, numbers in INPUTS.items():
            values, decoded = np.array(numbers, "<f4"), np.empty(len(numbers), "<f4")
            data = bytes(codec.encode(values, (7,)))
            codec.decode(data, decoded)
            entries.append(
                {
                    "codec": codec.name,
                    "of": description,
                    "values": values.tobytes().hex(),
                    "data": data.hex(),
                }
                | {"decoded": decoded.tobytes().hex()}
            )
    return entries


if __name__ == "__main__":
    about = __doc__.replace("\n", " ").strip()  # This text is in codecs.json.
    plain = vectors(map(codec_named, (*EXAMPLES, "topk:0.5")))
    text = json.dumps(
        {"about": about, "vectors": plain, "steady": vectors(STEADY.values())}, indent=1
    )
    Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")
