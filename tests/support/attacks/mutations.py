"""Messages that are nearly valid: valid ones, damaged by a seeded random generator."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "\0",
    "a\0b",
    "../../etc",
    "\u202e\U0001f600",
    "x" * 10_000,
    "'; drop table updates; --",
    "\n" * 100,
)
BLOBS = (b"", b"\0", bytes(31), bytes(33), b"\xff" * 10_000)
FLOAT_KINDS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def flipped(data: bytes, dice: random.Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(dice.randint(1, 8)):
        out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
    return bytes(out)


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def grown(data: bytes, dice: random.Random) -> bytes:
    position = dice.randrange(len(data) + 1)
    return data[:position] + dice.randbytes(dice.randint(1, 50)) + data[position:]


def doubled(data: bytes, dice: random.Random) -> bytes:
    position = dice.randrange(len(data) + 1)
    return data + data[position:] * dice.randint(1, 20)


def anything(data: bytes, dice: random.Random) -> bytes:
    return dice.randbytes(dice.randrange(300))


def confused(data: bytes, dice: random.Random) -> bytes:
    """Return a known field with another type than its own."""
    return (
        data
        + bytes([dice.randint(1, 15) << 3 | dice.randrange(8)])
        + dice.randbytes(dice.randrange(20))
    )


def huge_varint(data: bytes, dice: random.Random) -> bytes:
    return (
        data + bytes([dice.randint(1, 15) << 3]) + b"\xff" * dice.choice([9, 10, 11, 30]) + b"\x01"
    )


def lying_length(data: bytes, dice: random.Random) -> bytes:
    claimed = dice.choice(
        [b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x80\x80\x80\x80\x01"]
    )
    return data + bytes([dice.randint(1, 15) << 3 | 2]) + claimed + dice.randbytes(8)


def nested(data: bytes, dice: random.Random) -> bytes:
    """Return messages nested deeper than any parser should follow, or obsolete groups."""
    field = dice.randint(1, 15)
    if dice.random() < 0.5:
        return data + bytes([field << 3 | 3]) * dice.randint(50, 5000)
    inner = b""
    for _ in range(dice.randint(50, 120)):
        inner = bytes([field << 3 | 2]) + _varint(len(inner)) + inner
    return data + inner


def unknown(data: bytes, dice: random.Random) -> bytes:
    number = dice.randint(100, 2**28)
    return data + _varint(number << 3 | 1) + struct.pack("<d", dice.random())


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


BYTEWISE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flipped, cut, grown, doubled, anything, confused, huge_varint, lying_length, nested, unknown,
)  # fmt: skip


def extreme(message: Message, dice: random.Random) -> bytes:
    """Return a well-formed message in which one field, at any depth, has an unusual value."""
    changed = type(message)()
    changed.CopyFrom(message)
    inside: Message = changed
    while True:
        field = dice.choice(inside.DESCRIPTOR.fields) if inside.DESCRIPTOR.fields else None
        if field is None:
            return changed.SerializeToString()
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            break
        inside = (
            getattr(inside, field.name).add() if field.is_repeated else getattr(inside, field.name)
        )
        inside.SetInParent()
    values = _values(field)
    try:
        if field.is_repeated:
            getattr(inside, field.name).extend([dice.choice(values)] * dice.choice([1, 2, 1000]))
        else:
            setattr(inside, field.name, dice.choice(values))
    except (ValueError, TypeError):  # out of the field's range, so it cannot be encoded
        pass
    return changed.SerializeToString()


def _values(field: FieldDescriptor) -> tuple[object, ...]:
    if field.cpp_type in FLOAT_KINDS:
        return FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return BLOBS if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
    return (True, False) if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else NUMBERS


def damaged(message: Message, dice: random.Random, count: int) -> Iterator[bytes]:
    """Yield this many messages, of every kind in turn; every third is well-formed."""
    data = message.SerializeToString()
    for number in range(count):
        if number % 3 == 0:
            yield extreme(message, dice)
        else:
            yield BYTEWISE[number % len(BYTEWISE)](data, dice)
