"""The vectors in proto/vectors/streams.json, read as FORMAT.md and CLIENT.md say.

The reader below uses none of our codecs or streams, so it fails when these leave the format.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from fairfleet.common.tensors import Vector
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.support.paths import ROOT

FOLDER = ROOT / "proto" / "vectors"
VECTORS = json.loads((FOLDER / "streams.json").read_text())
CHUNK_ELEMENTS = {1: 262_144, 2: 262_144, 3: 131_072}  # of a raw32 stream, by section


def floats(text: str) -> Vector:
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def digest_of(chunks: list[tuple[int, int, int, int, bytes]]) -> str:
    return hashlib.sha256(b"".join(struct.pack("<QBQI16s", *chunk) for chunk in chunks)).hexdigest()


def chunked(section: int, values: NDArray[Any], elements: int, offset: int) -> list[Any]:
    chunks = []
    for first in range(0, len(values), elements):
        data = values[first : first + elements].tobytes()
        chunks.append((offset, section, first, len(values[first : first + elements]), data))
        offset += len(data)
    return chunks


def raw_digest(parameters: Vector, buffers: Vector, counters: NDArray[np.int64]) -> str:
    """Return the digest of a model by the chunking rule of CLIENT.md."""
    chunks: list[Any] = []
    for section, values in ((1, parameters), (2, buffers), (3, counters)):
        offset = chunks[-1][0] + len(chunks[-1][4]) if chunks else 0
        chunks += chunked(section, values, CHUNK_ELEMENTS[section], offset)
    return digest_of([(*chunk[:4], xxh3_128_digest(chunk[4])) for chunk in chunks])


def decode_int8(data: bytes, n: int) -> Vector:
    blocks = -(-n // 256)
    scales = np.frombuffer(data[: 4 * blocks], "<f4")
    codes = np.frombuffer(data[4 * blocks :], np.int8).astype(np.float32)
    return codes * np.repeat(scales, 256)[:n]


def rounded(values: Vector, codec: str) -> Vector:
    match codec:
        case "fp16":
            return values.astype(np.float16).astype(np.float32)
        case "bf16":
            bits = values.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view("<f4")
        case "int8":
            blocks = np.zeros((-(-len(values) // 256), 256), np.float32)
            blocks.reshape(-1)[: len(values)] = values
            peaks = np.abs(blocks).max(axis=1, keepdims=True)
            # The 0.0 turns a negative zero into the integer 0, which decodes to a positive zero.
            scales = 2.0 ** np.ceil(np.log2(peaks / 127))
            return (
                ((np.rint(blocks / scales) + 0.0) * scales)
                .astype(np.float32)
                .reshape(-1)[: len(values)]
            )
        case _:
            return values


def test_the_file_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("streams", FOLDER / "streams.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.document() == VECTORS, "run python proto/vectors/streams.py"


@pytest.mark.parametrize("entry", VECTORS["checksums"], ids=lambda entry: len(entry["data"]) // 2)
def test_checksums_are_canonical_xxh3(entry: dict[str, str]) -> None:
    assert xxh3_128_digest(bytes.fromhex(entry["data"])).hex() == entry["checksum"]


@pytest.mark.parametrize("entry", VECTORS["streams"], ids=lambda e: f"{e['of']}-{e.get('codec')}")
def test_streams_have_their_chunks_values_and_digest(entry: dict[str, Any]) -> None:
    chunks = [
        (c["offset_bytes"], c["section"], c["first_element"], c["elements"], c["checksum"])
        for c in entry["chunks"]
    ]
    assert digest_of([(*c[:4], bytes.fromhex(c[4])) for c in chunks]) == entry["digest"]
    assert sum(c["bytes"] for c in entry["chunks"]) == entry["size_bytes"]
    sections: dict[int, list[Any]] = {1: [], 2: [], 3: []}
    for fields in entry["chunks"]:
        if "message" not in fields:
            return
        chunk = Chunk.FromString(bytes.fromhex(fields["message"]))
        assert xxh3_128_digest(chunk.data).hex() == fields["checksum"] == chunk.checksum.hex()
        is_int8 = entry["codec"] == "int8" and chunk.section == 1
        kind = "<i8" if chunk.section == 3 else "<f4"
        values = (
            decode_int8(chunk.data, chunk.elements) if is_int8 else np.frombuffer(chunk.data, kind)
        )
        assert len(values) == chunk.elements
        sections[int(chunk.section)] += values.tolist()
    if "model" in entry:
        assert sections[1] == floats(entry["model"]["parameters"]).tolist()
        assert sections[2] == floats(entry["model"]["buffers"]).tolist()
        assert sections[3] == entry["model"]["counters"]
    if "trained" in entry:
        received, trained = entry["received"], entry["trained"]
        difference = floats(received["parameters"]) - floats(trained["parameters"])
        tolerance = 0 if entry["codec"] == "raw32" else np.abs(difference).max() * 1.01 / 127
        assert np.abs(np.array(sections[1], np.float32) - difference).max() <= tolerance
        assert sections[2] == floats(trained["buffers"]).tolist()
        assert sections[3] == trained["counters"]


def test_the_large_model_is_chunked_as_the_digest_of_a_model_needs() -> None:
    (entry,) = (entry for entry in VECTORS["streams"] if "large" in entry)
    parameters, buffers = (
        ((np.arange(n) % 251 - 125) / 64).astype("<f4") for n in entry["large"][:2]
    )
    counters = np.arange(entry["large"][2]) - 1000
    assert raw_digest(parameters, buffers, counters.astype("<i8")) == entry["digest"]
    assert [c["elements"] for c in entry["chunks"]] == [262144, 262144, 3, 262144, 1, 131072, 2]


@pytest.mark.parametrize(
    "entry", VECTORS["changes"], ids=lambda e: f"{e['halvings']}{e['rounded']}"
)
def test_changes_lead_to_the_exact_model(entry: dict[str, Any]) -> None:
    chunks = [Chunk.FromString(bytes.fromhex(message)) for message in entry["messages"]]
    change = decode_int8(chunks[0].data, chunks[0].elements)
    assert change.tolist() == floats(entry["decoded"]).tolist()
    step = change * np.float32(2.0 ** -entry["halvings"])
    after = rounded(floats(entry["before"]["parameters"]) + step, entry["rounded"])
    assert after.tolist() == floats(entry["after"]["parameters"]).tolist()
    buffers = np.frombuffer(chunks[1].data, "<f4").astype(np.float32)
    counters = np.frombuffer(chunks[2].data, "<i8")
    assert raw_digest(after, buffers, counters) == entry["after"]["digest"]


def test_error_feedback_sends_what_earlier_updates_lost() -> None:
    residual: Vector = np.zeros(300, np.float32)
    for entry in VECTORS["error_feedback"]:
        assert floats(entry["residual_before"]).tolist() == residual.tolist()
        vector = (floats(entry["received"]) - floats(entry["trained"])) + residual
        assert vector.tolist() == floats(entry["encoded_vector"]).tolist()
        decoded = decode_int8(bytes.fromhex(entry["data"]), len(vector))
        assert decoded.tolist() == floats(entry["decoded"]).tolist()
        residual = vector - decoded if entry["counts"] else residual
        assert floats(entry["residual_after"]).tolist() == residual.tolist()
    assert [entry["counts"] for entry in VECTORS["error_feedback"]] == [True, False, True]


@pytest.mark.parametrize("entry", VECTORS["plans"]["batches"], ids=str)
def test_a_single_last_sample_joins_the_batch_before_it(entry: dict[str, Any]) -> None:
    n = entry["samples"]
    size = min(entry["batch_size"] or n, n)
    count = n // size + (n % size > 1)
    epoch = [size] * (count - 1) + [n - size * (count - 1)]
    steps = entry["steps"] or entry["epochs"] * count
    assert entry["sizes"] == [epoch[step % count] for step in range(steps)]


@pytest.mark.parametrize("entry", VECTORS["plans"]["steps"], ids=lambda entry: entry["of"])
def test_steps_follow_the_formulas(entry: dict[str, Any]) -> None:
    received = floats(entry["received"]).astype(np.float64)
    values, v, a, b = received.copy(), 0.0, 0.0, 0.0
    m, rate = entry.get("momentum", 0.0), entry["learning_rate"]
    for t, (text, expected) in enumerate(zip(entry["gradients"], entry["parameters"], strict=True)):
        g = floats(text) + entry.get("proximal_mu", 0.0) * (values - received)
        g = g + entry.get("weight_decay", 0.0) * values
        if entry.get("solver") == "adam":
            a, b = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g**2
            d = (a / (1 - 0.9 ** (t + 1))) / (np.sqrt(b / (1 - 0.999 ** (t + 1))) + 1e-8)
        else:
            v = m * v + g
            d = g + m * v if entry.get("nesterov") else v
        values = values - rate * d
        np.testing.assert_allclose(floats(expected), values, rtol=1e-5, atol=1e-6)
