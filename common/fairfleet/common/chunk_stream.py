"""Encode, check and decode models and updates as streams of self-contained chunks.

The same serialized `Chunk` messages travel over gRPC and are stored in spool files, each behind
its length, so nothing is encoded twice. Every chunk is checked before a value of it is written.
proto/FORMAT.md describes the bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from fairfleet.common.codecs import CHUNK_BYTES, CHUNK_ELEMENTS, RAW32, Buffer, Codec
from fairfleet.common.codecs.prediction import decode_predicted
from fairfleet.common.errors import BadRequest, Corrupted, NotFinite, OutOfOrder
from fairfleet.common.net.grpc_compression import refuse_compressed
from fairfleet.common.net.protobuf_fields import message_fields, varint
from fairfleet.common.tensors import Model, Section, Signature, Vector, write_all
from fairfleet.proto.v1.model_pb2 import Chunk

COUNTERS_PER_CHUNK = CHUNK_BYTES // 8
_DIGEST_ENTRY = struct.Struct("<QBQI16s")  # offset, section, first element, elements, checksum
_RECORD = struct.Struct("<I8s")  # length, tag
MAX_MESSAGE_BYTES = CHUNK_BYTES + 4096  # of a chunk: its data and its other fields
_MAX_RECORD_BYTES = 64 << 20  # earlier versions stored whatever gRPC let through
_DATA_TAG = bytes([Chunk.DATA_FIELD_NUMBER << 3 | 2])


class Digest:
    """The identity of a stream: SHA-256 over the header fields of its chunks.

    The header fields include each chunk's checksum, so the digest covers the data as well.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, chunk: Chunk) -> None:
        """Add the header fields of the stream's next chunk."""
        self._hash.update(
            _DIGEST_ENTRY.pack(
                chunk.offset_bytes,
                chunk.section,
                chunk.first_element,
                chunk.elements,
                chunk.checksum,
            )
        )

    def value(self) -> bytes:
        """Return the digest of the chunks added so far, 32 bytes."""
        return self._hash.digest()


# Section, first element, number of elements, data. The data is valid until the next piece.
Pieces = Iterator[tuple[Section, int, int, Buffer]]


def float_pieces(
    section: Section, size: int, codec: Codec, values: Callable[[int, int], Vector]
) -> Pieces:
    """Yield the pieces of one section of `size` floats.

    `values(first, end)` returns the values of a chunk when it is needed, so the complete vector
    never has to exist.
    """
    for first in range(0, size, codec.elements_per_chunk):
        end = min(first + codec.elements_per_chunk, size)
        yield section, first, end - first, codec.encode(values(first, end))


def counter_pieces(counters: NDArray[np.int64]) -> Pieces:
    """Yield the pieces of the counters, as little-endian 64-bit integers."""
    for first in range(0, len(counters), COUNTERS_PER_CHUNK):
        part = counters[first : first + COUNTERS_PER_CHUNK]
        yield Section.COUNTERS, first, len(part), part.astype("<i8", copy=False).view(np.uint8).data


def model_pieces(model: Model, codec: Codec = RAW32) -> Pieces:
    """Yield the pieces of a model: parameters in `codec`, then buffers and counters."""
    yield from float_pieces(
        Section.PARAMETERS,
        len(model.parameters),
        codec,
        lambda first, end: model.parameters[first:end],
    )
    yield from state_pieces(model)


class Feedback(Protocol):
    """State that connects the successive updates of a lossy codec, chunk by chunk."""

    def before(self, first: int, values: Vector) -> bytes:
        """Replace the values from element `first` on, in place, by those to encode.

        The returned bytes are sent before the encoded values.
        """

    def after(self, values: Vector, decoded: Vector) -> None:
        """Receive the encoded values and what a receiver decodes. May overwrite both arrays."""


def digest_of(model: Model) -> bytes:
    """Return the digest of a model's raw32 stream, which identifies the model."""
    return encode(model_pieces(model), lambda head, data: None).digest


def update_pieces(
    received: Model, trained: Model, codec: Codec, seed: int = 0, feedback: Feedback | None = None
) -> Pieces:
    """Yield the pieces of an update.

    These are the pseudo-gradient `received - trained`, then the trained buffers and counters.
    Raises NotFinite if a difference is NaN or infinite.
    """
    size = len(trained.parameters)
    part, decoded = np.empty((2, min(size, codec.elements_per_chunk)), np.float32)
    for first in range(0, size, codec.elements_per_chunk):
        end = min(first + codec.elements_per_chunk, size)
        part, decoded = part[: end - first], decoded[: end - first]
        np.subtract(received.parameters[first:end], trained.parameters[first:end], out=part)
        prefix = b"" if feedback is None else feedback.before(first, part)
        check_finite(trained.signature, Section.PARAMETERS, first, part)
        data = codec.encode(part, (seed, first))
        if feedback is not None:
            codec.decode(data, decoded)
            feedback.after(part, decoded)
        yield Section.PARAMETERS, first, end - first, b"".join((prefix, data)) if prefix else data
    yield from state_pieces(trained)


def state_pieces(model: Model) -> Pieces:
    """Yield the pieces of a model's buffers and counters, without compression."""
    yield from float_pieces(
        Section.BUFFERS, len(model.buffers), RAW32, lambda first, end: model.buffers[first:end]
    )
    yield from counter_pieces(model.counters)


@dataclass(frozen=True)
class EncodedStream:
    """The digest and the size of a stream, available once it is written completely."""

    digest: bytes
    size_bytes: int


def encode(pieces: Pieces, write: Callable[[bytes, Buffer], None]) -> EncodedStream:
    """Pass every chunk to `write` as the two parts of one serialized message.

    The second part is the data, which is not copied.
    """
    digest, offset = Digest(), 0
    for section, first, elements, data in pieces:
        chunk = Chunk(
            offset_bytes=offset,
            checksum=xxh3_128_digest(data),
            section=int(section),  # type: ignore[arg-type]  # the generated enum has its own type
            first_element=first,
            elements=elements,
        )
        digest.add(chunk)
        write(chunk.SerializeToString() + _DATA_TAG + varint(len(data)), data)
        offset += len(data)
    return EncodedStream(digest.value(), offset)


def check_message_size(message: bytes) -> None:
    """Raise BadRequest if a chunk message is longer than its data and fields can be.

    Unknown fields would otherwise take memory and disk that no limit counts.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise BadRequest(
            f"a chunk message has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )


def split(message: bytes) -> tuple[Chunk, memoryview]:
    """Split a serialized chunk into its fields without `data`, and a view of `data`.

    Protobuf itself would copy the data twice. Raises BadRequest if the message is not a chunk.
    """
    view, head, data = memoryview(message), bytearray(), memoryview(b"")
    try:
        for tag, start, value_start, end in message_fields(view):
            if tag == _DATA_TAG[0]:
                data = view[value_start:end]
            else:
                head += view[start:end]
        return Chunk.FromString(bytes(head)), data
    except (IndexError, DecodeError) as error:
        refuse_compressed(message)
        raise BadRequest(f"not a Chunk message: {error}") from None


@dataclass
class Decoder:
    """Decode the chunks of one stream, in order, into the model `into`.

    Each chunk is checked before a value of it is written. `into.parameters` receives the decoded
    parameters: those of a model, or the differences of an update. With a `base`, the chunks are
    delta-coded against multiples of it.
    """

    into: Model
    codec: Codec
    base: Vector | None = None
    offset_bytes: int = 0
    _digest: Digest = field(default_factory=Digest)
    _section: Section = Section.PARAMETERS
    _element: int = 0

    def take(self, message: bytes) -> None:
        """Check and decode the next chunk.

        Raises OutOfOrder, Corrupted or BadRequest. The decoder then still expects this chunk.
        """
        chunk, data = split(message)
        self._check_data(chunk, data)
        self._check_position(chunk)
        self._decode(chunk.elements, data)
        self._digest.add(chunk)
        self._element += chunk.elements
        self.offset_bytes += len(data)

    def finish(self, digest: bytes) -> None:
        """Check that the stream is complete and has the announced digest.

        Raises OutOfOrder if chunks are missing, and Corrupted if the digest differs.
        """
        self._skip_full_sections()
        if not self._is_complete():
            raise OutOfOrder(
                f"the stream ended after {self._element} of {self._section_size()} "
                f"{self._section.name.lower()}; send it from the beginning"
            )
        if self._digest.value() != digest:
            raise Corrupted(
                f"the {self.offset_bytes} bytes have digest {self._digest.value().hex()[:16]}…, "
                f"announced was {digest.hex()[:16]}…; send it from the beginning"
            )

    def _check_data(self, chunk: Chunk, data: memoryview) -> None:
        """Check the size, the offset and the checksum of a chunk's data."""
        where = _describe(chunk)
        if len(data) > CHUNK_BYTES:
            raise BadRequest(
                f"{where} carries {len(data)} bytes; at most {CHUNK_BYTES} are allowed"
            )
        if chunk.offset_bytes != self.offset_bytes:
            raise OutOfOrder(
                f"{where} is not the one that follows; expected byte {self.offset_bytes}"
            )
        checksum = xxh3_128_digest(data)
        if checksum != chunk.checksum:
            check_checksum_form(where, chunk.checksum, checksum)
            raise Corrupted(f"{where} does not match its checksum; send it again")

    def _check_position(self, chunk: Chunk) -> None:
        """Check that a chunk's elements are the next ones of the model."""
        where = _describe(chunk)
        self._skip_full_sections()
        if self._is_complete():
            raise BadRequest(
                f"{where} comes after the model's last element: found element "
                f"{chunk.first_element} of section {chunk.section}, expected the end of the stream"
            )
        if int(chunk.section) != int(self._section) or chunk.first_element != self._element:
            raise BadRequest(
                f"{where} begins at element {chunk.first_element} of section {chunk.section}; "
                f"expected element {self._element} of {self._section.name.lower()} "
                f"({int(self._section)})"
            )
        limit = min(self._section_size() - self._element, CHUNK_ELEMENTS)
        if not 0 < chunk.elements <= limit:
            raise BadRequest(
                f"{where} declares {chunk.elements} elements; it may have 1 to {limit}"
            )

    def _decode(self, elements: int, data: memoryview) -> None:
        span = slice(self._element, self._element + elements)
        if self._section is Section.COUNTERS:
            self._decode_counters(span, data)
            return
        out = self.into.vector(self._section)[span]
        if self._section is not Section.PARAMETERS:
            RAW32.decode(data, out)
        elif self.base is None:
            self.codec.decode(data, out)
        else:
            decode_predicted(self.codec, data, self.base[span], out)
        check_finite(self.into.signature, self._section, self._element, out)

    def _decode_counters(self, span: slice, data: memoryview) -> None:
        elements = span.stop - span.start
        if len(data) != 8 * elements:
            raise BadRequest(
                f"{elements} counters take {8 * elements} bytes; the chunk has {len(data)}"
            )
        self.into.counters[span] = np.frombuffer(data, "<i8")

    def _section_size(self) -> int:
        return len(self.into.vector(self._section))

    def _is_complete(self) -> bool:
        """Return whether no element is missing. Call `_skip_full_sections` first."""
        return self._section is Section.COUNTERS and self._element == self._section_size()

    def _skip_full_sections(self) -> None:
        while self._element == self._section_size() and self._section < Section.COUNTERS:
            self._section, self._element = Section(self._section + 1), 0


def _describe(chunk: Chunk) -> str:
    return f"chunk at byte {chunk.offset_bytes}"


def check_checksum_form(where: str, checksum: bytes, expected: bytes) -> None:
    """Raise BadRequest if a checksum can never match.

    That is a checksum of another length, or the expected one in another byte order.
    """
    expectation = "expected 16 bytes, XXH3-128 in canonical (big-endian) order, see proto/FORMAT.md"
    if len(checksum) != len(expected):
        raise BadRequest(f"the checksum of the {where} has {len(checksum)} bytes; {expectation}")
    swapped = expected[8:] + expected[:8]
    if checksum in (expected[::-1], swapped, swapped[::-1]):
        raise BadRequest(f"the checksum of the {where} is in another byte order; {expectation}")


def check_finite(signature: Signature, section: Section, first: int, values: Vector) -> None:
    """Raise NotFinite if there is a NaN or an infinity among values from element `first` on.

    The message names the tensor and the element.
    """
    # A finite sum proves that every term is finite, in a tenth of the time of checking each one.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()) or np.isfinite(values).all():
            return
    bad = first + int(np.argmin(np.isfinite(values)))
    tensor, span = next(
        (tensor, span) for tensor, span in signature.spans(section) if bad < span.stop
    )
    raise NotFinite(
        f"element {bad - span.start} of tensor {tensor.name} is {values[bad - first]}, not a "
        "finite number; lower the local learning rate, or look for a division by zero in the task"
    )


def write_record(file: BinaryIO, tag: bytes, *message: Buffer) -> None:
    """Write one message, given in parts, behind its length and its stream's tag of 8 bytes.

    The tag is written last, because the file may hold an older stream. If the process is killed
    before the message is complete, the older bytes do not have the new tag, and are not read as
    a part of the new stream.
    """
    begin = file.seek(_RECORD.size, os.SEEK_CUR) - _RECORD.size
    for part in message:
        write_all(file, part)
    end = file.tell()
    file.seek(begin)
    write_all(file, _RECORD.pack(end - begin - _RECORD.size, tag))
    file.seek(end)


def read_records(file: BinaryIO, tag: bytes) -> Iterator[bytes]:
    """Yield the complete records of a stream, from the file's current position.

    The stream ends at an incomplete record, or at one that has the tag of another stream.
    """
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        length, record_tag = _RECORD.unpack(head)
        if record_tag != tag or length > _MAX_RECORD_BYTES:
            return
        message = file.read(length)
        if len(message) != length:
            return
        yield message


def record_bytes(message: bytes) -> int:
    """Return the size of a message's record in a file, in bytes."""
    return _RECORD.size + len(message)
