"""Streams of chunks are read as they were written, and damaged ones are refused."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.chunk_stream import (
    Decoder,
    EncodedStream,
    encode,
    model_pieces,
    read_records,
    record_bytes,
    split,
    update_pieces,
    write_record,
)
from fairfleet.common.codecs import RAW32, codec_named
from fairfleet.common.errors import BadRequest, Corrupted, FleetError, OutOfOrder
from fairfleet.common.tensors import Model
from fairfleet.proto.v1.model_pb2 import Chunk

TAG = b"this one"


def model(parameters: int = 5, buffers: int = 3, counters: int = 2, seed: int = 0) -> Model:
    draw = np.random.default_rng(seed)
    return Model.of(
        {"w": draw.standard_normal(parameters, dtype=np.float32)},
        {
            "b": draw.standard_normal(buffers, dtype=np.float32),
            "n": draw.integers(0, 2**60, counters),
        },
    )


def messages_of(given: Model) -> tuple[list[bytes], EncodedStream]:
    messages: list[bytes] = []
    encoded = encode(
        model_pieces(given), lambda head, data: messages.append(b"".join((head, data)))
    )
    return messages, encoded


def decoded(messages: list[bytes], encoded: EncodedStream, like: Model) -> Model:
    into = Model.empty(like.signature)
    decoder = Decoder(into, RAW32)
    for message in messages:
        decoder.take(message)
    decoder.finish(encoded.digest)
    assert decoder.offset_bytes == encoded.size_bytes
    return into


def assert_same(actual: Model, expected: Model) -> None:
    for name, array in actual.named().items():
        np.testing.assert_array_equal(array, expected.named()[name])


@given(parameters=st.integers(0, 600_000), buffers=st.integers(0, 4), counters=st.integers(0, 3))
def test_a_model_of_any_sections_is_decoded_bit_for_bit(
    parameters: int, buffers: int, counters: int
) -> None:
    sent = model(parameters, buffers, counters)
    assert_same(decoded(*messages_of(sent), like=sent), sent)


def test_protobuf_itself_reads_the_messages() -> None:
    """Our code writes the two parts of a message; every implementation must read them."""
    messages, encoded = messages_of(model(300_000))
    chunks = [Chunk.FromString(message) for message in messages]
    assert [len(chunk.data) for chunk in chunks] == [1 << 20, 1_200_000 - (1 << 20), 12, 16]
    assert sum(len(chunk.data) for chunk in chunks) == encoded.size_bytes
    for message, chunk in zip(messages, chunks, strict=True):
        assert split(chunk.SerializeToString())[1] == chunk.data  # Fields in protobuf's own order.
        head, data = split(message)
        assert (head.elements, bytes(data), head.data) == (chunk.elements, chunk.data, b"")


@pytest.mark.parametrize("codec", ["raw32", "fp16", "raw32+zstd"])
def test_an_update_has_parameter_differences_and_complete_state(codec: str) -> None:
    received, trained = model(seed=1), model(seed=2)
    messages: list[bytes] = []
    encoded = encode(
        update_pieces(received, trained, codec_named(codec)),
        lambda head, data: messages.append(b"".join((head, data))),
    )
    row = Model.empty(received.signature)
    decoder = Decoder(row, codec_named(codec))
    for message in messages:
        decoder.take(message)
    decoder.finish(encoded.digest)
    tolerance = 0 if codec.startswith("raw32") else 1e-3
    np.testing.assert_allclose(
        row.parameters, received.parameters - trained.parameters, rtol=tolerance, atol=0
    )
    np.testing.assert_array_equal(row.buffers, trained.buffers)
    np.testing.assert_array_equal(row.counters, trained.counters)


def test_fp16_clips_large_values_and_never_sends_an_infinity() -> None:
    out = np.empty(3, np.float32)
    codec_named("fp16").decode(
        codec_named("fp16").encode(np.array([1e9, -1e9, 1.5], np.float32)), out
    )
    np.testing.assert_array_equal(out, [65504, -65504, 1.5])


def test_equal_models_and_only_they_have_equal_digests() -> None:
    assert messages_of(model())[1] == messages_of(model())[1]
    changed = model()
    changed.parameters[3] += 1e-3
    assert messages_of(changed)[1].digest != messages_of(model())[1].digest


@given(position=st.integers(0, 2**31), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(position: int, bit: int) -> None:
    sent = model(50)
    messages, encoded = messages_of(sent)
    stream = bytearray(b"".join(messages))
    stream[position % len(stream)] ^= 1 << bit
    ends = np.cumsum([len(message) for message in messages])
    torn = [
        bytes(part) for part in (stream[: ends[0]], stream[ends[0] : ends[1]], stream[ends[1] :])
    ]
    with contextlib.suppress(FleetError):  # The stream may be refused; otherwise it must be exact.
        assert_same(decoded(torn, encoded, sent), sent)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_without_a_crash(garbage: bytes) -> None:
    decoder = Decoder(Model.empty(model().signature), RAW32)
    with pytest.raises((BadRequest, Corrupted, OutOfOrder)):
        decoder.take(garbage)


def test_a_decoder_continues_after_the_last_good_chunk() -> None:
    sent = model(300_000)
    messages, encoded = messages_of(sent)
    into = Model.empty(sent.signature)
    decoder = Decoder(into, RAW32)
    decoder.take(messages[0])
    with pytest.raises(OutOfOrder):
        decoder.take(messages[0])
    with pytest.raises(Corrupted):
        decoder.take(messages[1][:-1] + b"x")
    with pytest.raises(OutOfOrder, match="300000 parameters"):
        decoder.finish(encoded.digest)
    for message in messages[1:]:
        decoder.take(message)
    decoder.finish(encoded.digest)
    assert_same(into, sent)


@given(cut=st.integers(0, 200))
def test_a_truncated_spool_file_yields_its_complete_records(cut: int) -> None:
    records = [b"first", b"second record", b"", b"x" * 100]
    file = io.BytesIO()
    for record in records:
        write_record(file, TAG, record[:2], record[2:])  # type: ignore[arg-type]
    ends = np.cumsum([record_bytes(record) for record in records])
    torn = io.BytesIO(file.getvalue()[:cut])
    assert list(read_records(torn, TAG)) == records[: int(np.searchsorted(ends, cut, side="right"))]


def test_a_record_that_declares_a_huge_length_is_not_read() -> None:
    assert list(read_records(io.BytesIO(b"\xff\xff\xff\x7f" + TAG + bytes(100)), TAG)) == []


def test_records_of_an_earlier_stream_are_not_read() -> None:
    file = io.BytesIO()
    for record in (b"an old stream", b"of three", b"records"):
        write_record(file, b"old tag.", record)  # type: ignore[arg-type]
    file.seek(0)
    write_record(file, TAG, b"a new stream!")  # type: ignore[arg-type]  # as long as the old one
    file.seek(0)
    assert list(read_records(file, TAG)) == [b"a new stream!"]


@pytest.mark.parametrize(("buffers", "counters"), [(0, 0), (3, 0), (3, 2)])
def test_a_chunk_after_the_last_element_is_refused_with_that_reason(
    buffers: int, counters: int
) -> None:
    sent = Model.of({"w": np.ones(5, np.float32)}, {"b": np.ones(3, np.float32)} if buffers else {})
    sent = model(5, buffers, counters) if counters else sent
    messages, encoded = messages_of(sent)
    decoder = Decoder(Model.empty(sent.signature), RAW32)
    for message in messages:
        decoder.take(message)
    last, data = split(messages[-1])
    last.offset_bytes = encoded.size_bytes
    last.data = bytes(data)
    with pytest.raises(BadRequest, match="comes after the model's last element"):
        decoder.take(last.SerializeToString())
    decoder.finish(encoded.digest)
