"""Protobuf messages as plain values, for `--json`.

Unlike protobuf's own JSON form, 64-bit numbers stay numbers, enums are short lower-case words, and
a number that JSON cannot express (NaN, infinity) is null.
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Return the fields of a message, by name, as values that `json.dumps` accepts.

    Optional fields that are not set are left out. Fields without presence appear with their
    default.
    """
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def word(enum: EnumDescriptor, number: int) -> str:
    """Return the short name of an enum value: PHASE_TRAINING of Phase is `training`.

    A number that only a newer server defines is returned as digits.
    """
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return value.name.removeprefix(prefix).lower() if value else str(number)


def _value(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_single(field, each) for each in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return word(field.enum_type, value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
