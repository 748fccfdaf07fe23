"""The selection of a codec for a client."""

from __future__ import annotations

import numpy as np
import pytest

from fairfleet.common.cli.settings import read_settings
from fairfleet.common.codecs import ABILITIES, codec_named, roundtrip
from fairfleet.common.errors import BadSettings, WrongState
from fairfleet.common.tensors import Model
from fairfleet.server.settings import ServerSettings
from fairfleet.server.transfer.codec_selection import LADDER, TELLING_BYTES, CodecPolicy, Uplinks
from fairfleet.server.transfer.upload_registry import raw_bytes

MEGABYTE = 1_000_000
AUTO = CodecPolicy("auto", {"fast": "raw32"}, upload_seconds=10, raw_bytes=40 * MEGABYTE)


def test_a_client_uses_its_own_codec_or_that_of_the_federation() -> None:
    policy = CodecPolicy("int8", {"slow": "topk:0.01+zstd"}, 10, 1000)
    assert policy.choose("any", ABILITIES) == "int8"
    assert policy.choose("slow", ABILITIES) == "topk:0.01+zstd"
    assert policy.choose("old", ["raw32", "fp16"]) == "raw32"
    with pytest.raises(WrongState, match="no codec in common"):
        policy.choose("odd", ["smoke-signals"])


@pytest.mark.parametrize(
    ("uplink", "codec"),
    [(None, "int8"), (100 * MEGABYTE, "bf16"), (2 * MEGABYTE, "bf16"), (1.9 * MEGABYTE, "int8"),
     (0.6 * MEGABYTE, "int4"), (0.5 * MEGABYTE, "topsign:0.1"),
     (0.4 * MEGABYTE, "topk:0.1"), (0.04 * MEGABYTE, "topk:0.01"), (1.0, "topk:0.01")],
)  # fmt: skip
def test_auto_selects_the_most_precise_codec_that_the_uplink_carries_in_time(
    uplink: float | None, codec: str
) -> None:
    assert AUTO.choose("any", ABILITIES, uplink) == codec
    assert AUTO.choose("fast", ABILITIES, uplink) == "raw32"


def test_auto_selects_only_codecs_that_the_client_supports() -> None:
    before_topsign = [ability for ability in ABILITIES if ability != "topsign"]
    assert AUTO.choose("older", before_topsign, 0.5 * MEGABYTE) == "topk:0.1"
    assert AUTO.choose("oldest", ["raw32", "int8"], 1.0) == "int8"
    assert AUTO.choose("plain", ["raw32"], 1.0) == "raw32"


@pytest.mark.parametrize(("codec", "share"), LADDER.items())
def test_the_size_shares_that_auto_uses_are_true(codec: str, share: float) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    assert roundtrip(codec, values).encoded_bytes / values.nbytes == pytest.approx(share, rel=0.1)


def test_the_uplink_is_measured_by_long_transfers_and_follows_the_newest() -> None:
    uplinks = Uplinks()
    uplinks.saw("a", TELLING_BYTES - 1, 10.0)
    assert uplinks.of("a") is None
    uplinks.saw("a", MEGABYTE, 1.0)
    assert uplinks.of("a") == MEGABYTE
    for _ in range(10):
        uplinks.saw("a", 3 * MEGABYTE, 1.0)
    assert uplinks.of("a") == pytest.approx(3 * MEGABYTE, rel=0.01)
    assert uplinks.of("b") is None


def test_the_settings_refuse_an_unknown_codec_and_name_the_known_ones() -> None:
    flags = {"codec": "auto", "compression.clients": {"a": "topk:0.01", "b": "auto"}}
    settings = read_settings(ServerSettings, None, flags)
    assert settings.codec_policy(5).of_clients == {"a": "topk:0.01", "b": "auto"}
    with pytest.raises(BadSettings, match=r"codec: unknown codec zip; known here: raw32.*auto"):
        read_settings(ServerSettings, None, {"codec": "zip"})
    with pytest.raises(BadSettings, match=r"compression.clients: unknown codec topk:7"):
        read_settings(ServerSettings, None, {"compression.clients": {"a": "topk:7"}})


@pytest.mark.parametrize("size", [1, 2, 3, 100, 65_536, 300_000])
@pytest.mark.parametrize(
    "codec",
    [
        "raw32",
        "raw32+zstd",
        "fp16+zstd",
        "int8",
        "sign+zstd",
        "topk:1",
        "topk:1+zstd",
        "topsign:1+zstd",
    ],
)
def test_no_codec_needs_more_than_the_default_upload_limit(codec: str, size: int) -> None:
    used = codec_named(codec)
    values = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    chunks = range(0, size, used.elements_per_chunk)
    largest = sum(
        len(used.encode(values[first : first + used.elements_per_chunk])) for first in chunks
    )
    assert largest <= raw_bytes(Model.of({"w": values}).signature)
