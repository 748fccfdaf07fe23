"""Models and updates as streams of self-contained chunks: writing them, checking and decoding them.

The same serialized `Chunk` messages travel over gRPC and lie in spool files (each behind its
length), so nothing is ever encoded twice. proto/FORMAT.md describes the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from fairfleet.common.codecs import CHUNK_BYTES, RAW32, Codec
from fairfleet.common.errors import BadRequest, Corrupted, OutOfOrder
from fairfleet.common.tensors import Model, Section, Vector, write_all
from fairfleet.proto.v1.model_pb2 import Chunk
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

COUNTERS_PER_CHUNK = CHUNK_BYTES // 8
_DIGESTED = struct.Struct("<QBQI16s")  # offset, section, first element, elements, checksum
_LENGTH = struct.Struct("<I")


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


Pieces = Iterator[tuple[Section, int, int, bytes]]  # section, first element, elements, data


def float_pieces(section: Section, size: int, codec: Codec, values: Callable[[int, int], Vector]) -> Pieces:
    """`values(first, end)` gives each chunk's values when it is due, so that no whole vector need exist."""
    for first in range(0, size, codec.elements_per_chunk):
        end = min(first + codec.elements_per_chunk, size)
        yield section, first, end - first, codec.encode(values(first, end))


def counter_pieces(counters: NDArray[np.int64]) -> Pieces:
    for first in range(0, len(counters), COUNTERS_PER_CHUNK):
        part = counters[first : first + COUNTERS_PER_CHUNK]
        yield Section.COUNTERS, first, len(part), part.astype("<i8", copy=False).tobytes()


def model_pieces(model: Model) -> Pieces:
    yield from float_pieces(
        Section.PARAMETERS, len(model.parameters), RAW32, lambda first, end: model.parameters[first:end]
    )
    yield from state_pieces(model)


def update_pieces(received: Model, trained: Model, codec: Codec) -> Pieces:
    """The pseudo-gradient `received - trained`, then the trained buffers and counters as they are."""

    def difference(first: int, end: int) -> Vector:
        return received.parameters[first:end] - trained.parameters[first:end]

    yield from float_pieces(Section.PARAMETERS, len(trained.parameters), codec, difference)
    yield from state_pieces(trained)


def state_pieces(model: Model) -> Pieces:
    yield from float_pieces(Section.BUFFERS, len(model.buffers), RAW32, lambda first, end: model.buffers[first:end])
    yield from counter_pieces(model.counters)


@dataclass(frozen=True)
class Encoded:
    """What is to be said of a whole stream once it is written."""

    digest: bytes
    size_bytes: int


def encode(pieces: Pieces, take: Callable[[bytes, int], None]) -> Encoded:
    """Hands every serialized chunk, with its offset, to `take`."""
    digest, offset = Digest(), 0
    for section, first, elements, data in pieces:
        chunk = Chunk(
            offset_bytes=offset,
            data=data,
            checksum=xxh3_128_digest(data),
            section=int(section),  # type: ignore[arg-type]  # the generated enum's type is its own
            first_element=first,
            elements=elements,
        )
        digest.add(chunk)
        take(chunk.SerializeToString(), offset)
        offset += len(data)
    return Encoded(digest.value(), offset)


@dataclass
class Decoder:
    """Takes the chunks of one stream in order, each checked before a value of it is written into `into`.

    `into.parameters` receives the decoded parameters: a model's, or an update's differences.
    """

    into: Model
    codec: Codec
    offset_bytes: int = 0
    _digest: Digest = field(default_factory=Digest)
    _section: Section = Section.PARAMETERS
    _element: int = 0

    def take(self, message: bytes) -> None:
        try:
            chunk = Chunk.FromString(message)
        except DecodeError as error:
            raise BadRequest(f"after {self.offset_bytes} bytes: not a Chunk message: {error}") from None
        data = chunk.data
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

    def _check(self, chunk: Chunk, data: bytes) -> None:
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
        if not 0 < chunk.elements <= self._section_size() - self._element:
            raise BadRequest(
                f"{where} declares {chunk.elements} elements; "
                f"the section has {self._section_size() - self._element} left"
            )

    def _decode(self, elements: int, data: bytes) -> None:
        if self._section is Section.COUNTERS:
            if len(data) != 8 * elements:
                raise BadRequest(f"{elements} counters take {8 * elements} bytes; the chunk has {len(data)}")
            self.into.counters[self._element : self._element + elements] = np.frombuffer(data, "<i8")
            return
        codec = self.codec if self._section is Section.PARAMETERS else RAW32
        out = self.into.vector(self._section)[self._element : self._element + elements]
        codec.decode(data, out)
        if not is_finite(out):
            bad = self._element + int(np.argmin(np.isfinite(out)))
            raise BadRequest(
                f"{self._name_of(bad)} is {out[bad - self._element]}, not a finite number; "
                "lower the local learning rate or look for a division by zero in the task"
            )

    def _name_of(self, element: int) -> str:
        for tensor, span in self.into.signature.spans(self._section):
            if element < span.stop:
                return f"element {element - span.start} of tensor {tensor.name}"
        raise AssertionError("an element beyond the last tensor")  # pragma: no cover

    def _section_size(self) -> int:
        return len(self.into.vector(self._section))

    def _skip_full_sections(self) -> None:
        while self._element == self._section_size() and self._section < Section.COUNTERS:
            self._section, self._element = Section(self._section + 1), 0


def is_finite(values: Vector) -> bool:
    # A sum is finite only if every term is, and takes a tenth of the time of looking at each.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())


def write_record(file: BinaryIO, message: bytes) -> None:
    write_all(file, _LENGTH.pack(len(message)))
    write_all(file, message)


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """The whole records of a spool file; a torn one at the end is left out."""
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length > 2 * CHUNK_BYTES or len(message := file.read(length)) != length:
            return
        yield message


def record_bytes(message: bytes) -> int:
    return _LENGTH.size + len(message)
