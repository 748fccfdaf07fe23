"""Find codecs by name, and select one that both client and server support.

To add a codec, add it to the tables of this module and to proto/FORMAT.md.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from fairfleet.common.codecs.base import Codec
from fairfleet.common.codecs.floats import Bf16Codec, FloatCodec
from fairfleet.common.codecs.quantized import QuantizedCodec
from fairfleet.common.codecs.sign import SignCodec
from fairfleet.common.codecs.topk import TopKCodec
from fairfleet.common.codecs.topsign import TopSignCodec
from fairfleet.common.codecs.zstd import ZstdCodec
from fairfleet.common.errors import BadRequest, WrongState, short

RAW32 = FloatCodec("raw32", "<f4")
_PLAIN: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RAW32,
        FloatCodec("fp16", "<f2"),
        Bf16Codec(),
        QuantizedCodec(8, block=256),
        QuantizedCodec(4, block=64),
        SignCodec(),
    )
}
_WITH_FRACTION: dict[str, Callable[[str], Codec]] = {"topk": TopKCodec, "topsign": TopSignCodec}
_FRACTION = re.compile(r"0\.[0-9]{1,6}|1")

# What a client reports as supported. It can use every codec name composed of these.
ABILITIES = (*_PLAIN, *_WITH_FRACTION, "zstd")
EXAMPLES = (*_PLAIN, "topk:0.01", "topsign:0.1", "int8+zstd")


@functools.lru_cache(maxsize=64)
def codec_named(name: str) -> Codec:
    """Return the codec of a name. Raises BadRequest if there is none."""
    plain, plus, compressor = name.partition("+")
    if plus:
        if compressor != "zstd":
            raise _unknown(name)
        return ZstdCodec(_plain(plain, name))
    return _plain(plain, name)


def _plain(plain: str, name: str) -> Codec:
    if plain in _PLAIN:
        return _PLAIN[plain]
    kind, _, fraction = plain.partition(":")
    if kind in _WITH_FRACTION and _FRACTION.fullmatch(fraction) and float(fraction) > 0:
        return _WITH_FRACTION[kind](fraction)
    raise _unknown(name)


def _unknown(name: str) -> BadRequest:
    return BadRequest(
        f"unknown codec {short(name)}; known here: {', '.join(_PLAIN)}, topk:FRACTION and "
        "topsign:FRACTION (such as topk:0.01), and each with +zstd behind it"
    )


def needs(name: str) -> frozenset[str]:
    """Return the abilities that a peer needs for the codec of this name."""
    return frozenset(part.partition(":")[0] for part in name.split("+"))


def agree(preferred: str, offered: list[str]) -> str:
    """Return the codec to use with a peer that offers these abilities.

    That is the preferred one if the peer supports it, otherwise the first plain one that the peer
    offers. Raises WrongState if there is none.
    """
    if needs(preferred) <= set(offered):
        return preferred
    for name in offered:
        if name in _PLAIN:
            return name
    raise WrongState(
        f"no codec in common: the client offers {short(', '.join(offered) or 'none')}, "
        f"this server knows {', '.join(ABILITIES)}. Upgrade the older side."
    )
