"""Models and updates as streams of self-contained chunks: writing them, checking and decoding them.

The same serialized `Chunk` messages travel over gRPC and lie in spool files (each behind its
length), so nothing is ever encoded twice. proto/FORMAT.md describes the bytes.
"""

from __future__ import annotations

import hashlib
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
from fairfleet.common.tensors import Model, Section, Signature, Vector, write_all
from fairfleet.proto.v1.model_pb2 import Chunk

MOST_FIELDS = 64  # of a message that has six: newer writers may know others
COUNTERS_PER_CHUNK = CHUNK_BYTES // 8
_DIGESTED = struct.Struct("<QBQI16s")  # offset, section, first element, elements, checksum
_RECORD = struct.Struct("<I8s")  # length, tag
_DATA_TAG = bytes([Chunk.DATA_FIELD_NUMBER << 3 | 2])


class Digest:
    """The identity of a stream: SHA-256 over what its chunks say of themselves, checksums included."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, chunk: Chunk) -> None:
        self._hash.update(
            _DIGESTED.pack(chunk.offset_bytes, chunk.section, chunk.first_element, chunk.elements, chunk.checksum)
        )

    def value(self) -> bytes:
        return self._hash.digest()


Pieces = Iterator[tuple[Section, int, int, Buffer]]  # section, first element, elements, data until the next piece


def float_pieces(section: Section, size: int, codec: Codec, values: Callable[[int, int], Vector]) -> Pieces:
    """`values(first, end)` gives each chunk's values when it is due, so that no whole vector need exist."""
    for first in range(0, size, codec.elements_per_chunk):
        end = min(first + codec.elements_per_chunk, size)
        yield section, first, end - first, codec.encode(values(first, end))


def counter_pieces(counters: NDArray[np.int64]) -> Pieces:
    for first in range(0, len(counters), COUNTERS_PER_CHUNK):
        part = counters[first : first + COUNTERS_PER_CHUNK]
        yield Section.COUNTERS, first, len(part), part.astype("<i8", copy=False).view(np.uint8).data


def model_pieces(model: Model, codec: Codec = RAW32) -> Pieces:
    yield from float_pieces(
        Section.PARAMETERS, len(model.parameters), codec, lambda first, end: model.parameters[first:end]
    )
    yield from state_pieces(model)


class Feedback(Protocol):
    """What a lossy codec's updates have to do with each other, chunk by chunk."""

    def before(self, first: int, values: Vector) -> bytes:
        """Turns the values from element `first` on into those to be encoded; what it returns goes ahead of them."""

    def after(self, values: Vector, decoded: Vector) -> None:
        """Learns what became of these values. Both arrays are its own from now on."""


def digest_of(model: Model) -> bytes:
    """The name of a model: that of its stream."""
    return encode(model_pieces(model), lambda head, data: None).digest


def update_pieces(
    received: Model, trained: Model, codec: Codec, seed: int = 0, feedback: Feedback | None = None
) -> Pieces:
    """The pseudo-gradient `received - trained`, then the trained buffers and counters as they are."""
    size = len(trained.parameters)
    part, decoded = np.empty((2, min(size, codec.elements_per_chunk)), np.float32)
    for first in range(0, size, codec.elements_per_chunk):
        end = min(first + codec.elements_per_chunk, size)
        part, decoded = part[: end - first], decoded[: end - first]
        np.subtract(received.parameters[first:end], trained.parameters[first:end], out=part)
        ahead = b"" if feedback is None else feedback.before(first, part)
        check_finite(trained.signature, Section.PARAMETERS, first, part)
        data = codec.encode(part, (seed, first))
        if feedback is not None:
            codec.decode(data, decoded)
            feedback.after(part, decoded)
        yield Section.PARAMETERS, first, end - first, b"".join((ahead, data)) if ahead else data
    yield from state_pieces(trained)


def state_pieces(model: Model) -> Pieces:
    yield from float_pieces(Section.BUFFERS, len(model.buffers), RAW32, lambda first, end: model.buffers[first:end])
    yield from counter_pieces(model.counters)


@dataclass(frozen=True)
class Encoded:
    """What is to be said of a whole stream once it is written."""

    digest: bytes
    size_bytes: int


def encode(pieces: Pieces, take: Callable[[bytes, Buffer], None]) -> Encoded:
    """Hands every chunk to `take` as two parts of one serialized message: the second is the data, not copied."""
    digest, offset = Digest(), 0
    for section, first, elements, data in pieces:
        chunk = Chunk(
            offset_bytes=offset,
            checksum=xxh3_128_digest(data),
            section=int(section),  # type: ignore[arg-type]  # the generated enum's type is its own
            first_element=first,
            elements=elements,
        )
        digest.add(chunk)
        take(chunk.SerializeToString() + _DATA_TAG + _varint(len(data)), data)
        offset += len(data)
    return Encoded(digest.value(), offset)


def split(message: bytes) -> tuple[Chunk, memoryview]:
    """A serialized chunk as its fields without `data`, and `data` in place: protobuf itself would copy it twice."""
    view, at, head, data, fields = memoryview(message), 0, bytearray(), memoryview(b""), 0
    try:
        while at < len(view):
            fields += 1
            if fields > MOST_FIELDS:  # each is a turn of this loop, and a megabyte holds half a million
                raise IndexError(f"it has more than {MOST_FIELDS} fields")
            begin = at
            tag, at = _read_varint(view, at)
            length, at = _read_varint(view, at) if tag & 7 in (0, 2) else (4 if tag & 7 == 5 else 8, at)
            end = at if tag & 7 == 0 else at + length
            if end > len(view):
                raise IndexError("a field is longer than the message")
            if tag == _DATA_TAG[0]:
                data = view[at:end]
            else:
                head += view[begin:end]
            at = end
        return Chunk.FromString(bytes(head)), data
    except (IndexError, DecodeError) as error:
        raise BadRequest(f"not a Chunk message: {error}") from None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        value |= (view[at] & 127) << shift
        at += 1
        if view[at - 1] < 128:
            return value, at
    raise IndexError("a number is longer than 64 bits")


@dataclass
class Decoder:
    """Takes the chunks of one stream in order, each checked before a value of it is written into `into`.

    `into.parameters` receives the decoded parameters: a model's, or an update's differences. With a `base` its chunks
    say how they differ from multiples of that.
    """

    into: Model
    codec: Codec
    base: Vector | None = None
    offset_bytes: int = 0
    _digest: Digest = field(default_factory=Digest)
    _section: Section = Section.PARAMETERS
    _element: int = 0

    def take(self, message: bytes) -> None:
        chunk, data = split(message)
        self._check(chunk, data)
        self._decode(chunk.elements, data)
        self._digest.add(chunk)
        self._element += chunk.elements
        self.offset_bytes += len(data)

    def finish(self, digest: bytes) -> None:
        """Everything must have come, and be what was announced."""
        self._skip_full_sections()
        if self._section_size() != self._element:
            raise OutOfOrder(
                f"the stream ended after {self._element} of {self._section_size()} "
                f"{self._section.name.lower()}; send it from the beginning"
            )
        if self._digest.value() != digest:
            raise Corrupted(
                f"the {self.offset_bytes} bytes have digest {self._digest.value().hex()[:16]}…, "
                f"announced was {digest.hex()[:16]}…; send it from the beginning"
            )

    def _check(self, chunk: Chunk, data: memoryview) -> None:
        where = f"chunk at byte {chunk.offset_bytes}"
        if len(data) > CHUNK_BYTES:
            raise BadRequest(f"{where} carries {len(data)} bytes; at most {CHUNK_BYTES} are allowed")
        if chunk.offset_bytes != self.offset_bytes:
            raise OutOfOrder(f"{where} is not the one that follows; expected byte {self.offset_bytes}")
        if xxh3_128_digest(data) != chunk.checksum:
            raise Corrupted(f"{where} does not match its checksum; send it again")
        self._skip_full_sections()
        if int(chunk.section) != int(self._section) or chunk.first_element != self._element:
            raise BadRequest(
                f"{where} begins at element {chunk.first_element} of section {chunk.section}; "
                f"expected element {self._element} of {self._section.name.lower()} ({int(self._section)})"
            )
        left = min(self._section_size() - self._element, CHUNK_ELEMENTS)
        if not 0 < chunk.elements <= left:
            raise BadRequest(f"{where} declares {chunk.elements} elements; it may have 1 to {left}")

    def _decode(self, elements: int, data: memoryview) -> None:
        if self._section is Section.COUNTERS:
            if len(data) != 8 * elements:
                raise BadRequest(f"{elements} counters take {8 * elements} bytes; the chunk has {len(data)}")
            self.into.counters[self._element : self._element + elements] = np.frombuffer(data, "<i8")
            return
        span = slice(self._element, self._element + elements)
        out = self.into.vector(self._section)[span]
        if self._section is not Section.PARAMETERS:
            RAW32.decode(data, out)
        elif self.base is None:
            self.codec.decode(data, out)
        else:
            decode_predicted(self.codec, data, self.base[span], out)
        check_finite(self.into.signature, self._section, self._element, out)

    def _section_size(self) -> int:
        return len(self.into.vector(self._section))

    def _skip_full_sections(self) -> None:
        while self._element == self._section_size() and self._section < Section.COUNTERS:
            self._section, self._element = Section(self._section + 1), 0


def check_finite(signature: Signature, section: Section, first: int, values: Vector) -> None:
    """Refuses a NaN or an infinity among values that begin at element `first`, by the name of its tensor."""
    # A sum is finite only if every term is, and takes a tenth of the time of looking at each.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()) or np.isfinite(values).all():
            return
    bad = first + int(np.argmin(np.isfinite(values)))
    tensor, span = next((tensor, span) for tensor, span in signature.spans(section) if bad < span.stop)
    raise NotFinite(
        f"element {bad - span.start} of tensor {tensor.name} is {values[bad - first]}, not a finite number; "
        "lower the local learning rate, or look for a division by zero in the task"
    )


def write_record(file: BinaryIO, tag: bytes, *message: Buffer) -> None:
    """One message, in as many parts as it comes in. The tag says to which stream it belongs."""
    write_all(file, _RECORD.pack(sum(len(part) for part in message), tag))
    for part in message:
        write_all(file, part)


def read_records(file: BinaryIO, tag: bytes) -> Iterator[bytes]:
    """The whole records of a stream from here on. A torn one ends it, and one that another stream left in the file."""
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        length, found = _RECORD.unpack(head)
        if found != tag or length > 2 * CHUNK_BYTES or len(message := file.read(length)) != length:
            return
        yield message


def record_bytes(message: bytes) -> int:
    return _RECORD.size + len(message)
