"""Find the fields of a serialized protobuf message without copying their values.

Protobuf itself copies a large bytes field twice when it parses a message. These functions rely
only on the protobuf wire format, and raise IndexError for any bytes that do not follow it.
"""

from __future__ import annotations

from collections.abc import Iterator

# Reading a field costs one step of a Python loop, and a megabyte can hold half a million fields.
# The messages read here have far fewer fields; newer writers may add some.
MAX_FIELDS = 64

# Wire types: the lower three bits of a field's tag.
_VARINT, _LENGTH_DELIMITED, _FIXED32 = 0, 2, 5


def message_fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tag, the start, the start of the value and the end of every field."""
    start = count = 0
    while start < len(view):
        count += 1
        if count > MAX_FIELDS:
            raise IndexError(f"it has more than {MAX_FIELDS} fields")
        tag, value_start = read_varint(view, start)
        wire_type = tag & 7
        length = 4 if wire_type == _FIXED32 else 8
        if wire_type in (_VARINT, _LENGTH_DELIMITED):
            length, value_start = read_varint(view, value_start)
        end = value_start if wire_type == _VARINT else value_start + length
        if end > len(view):
            raise IndexError("a field is longer than the message")
        yield tag, start, value_start, end
        start = end


def varint(value: int) -> bytes:
    """Return the varint encoding of a number that is not negative."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position behind it."""
    value = 0
    for shift in range(0, 64, 7):
        value |= (view[position] & 127) << shift
        position += 1
        if view[position - 1] < 128:
            return value, position
    raise IndexError("a number is longer than 64 bits")
