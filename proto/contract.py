"""What the wire protocol has promised so far, and whether the .proto files still keep it.

    python proto/contract.py            says what a change would break; exits with 1 if anything
    python proto/contract.py --extend   records what was added; refuses while anything is broken

`contract.json` lists every message's fields by number (name, type, whether repeated), every enum's values and every
service's calls. Whatever stands there must stay, or be reserved, number and name: devices in the field speak it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from fairfleet.proto.v1 import enrolment_pb2, fleet_pb2, model_pb2, operator_pb2

FILE = Path(__file__).with_name("contract.json")
Contract = dict[str, dict[str, Any]]


def current() -> tuple[Contract, dict[str, set[str]]]:
    """What the .proto files say, and what each message reserves (numbers and names)."""
    contract: Contract = {}
    reserved: dict[str, set[str]] = {}
    for module in (model_pb2, fleet_pb2, operator_pb2, enrolment_pb2):
        file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for name, message in _messages(file):
            contract[name] = {str(field.number): _field(field) for field in message.field}
            numbers = {str(n) for span in message.reserved_range for n in range(span.start, span.end)}
            reserved[name] = numbers | set(message.reserved_name)
            contract.update((f"{name}.{enum.name}", _values(enum)) for enum in message.enum_type)
        contract.update((f"{file.package}.{enum.name}", _values(enum)) for enum in file.enum_type)
        for service in file.service:
            contract[f"{file.package}.{service.name}"] = {
                call.name: [call.input_type, call.client_streaming, call.output_type, call.server_streaming]
                for call in service.method
            }
    return contract, reserved


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    left = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    while left:
        name, message = left.pop()
        yield name, message
        left += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]


def _field(field: FieldDescriptorProto) -> list[Any]:
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return [field.name, FieldDescriptorProto.Type.Name(field.type), field.type_name, repeated]


def _values(enum: EnumDescriptorProto) -> dict[str, Any]:
    return {str(value.number): value.name for value in enum.value}


def broken(promised: Contract, now: Contract, reserved: dict[str, set[str]]) -> list[str]:
    """Every promise that is not kept, in words."""
    found = []
    for name, entries in promised.items():
        if name not in now:
            found.append(f"{name} is gone")
            continue
        for key, entry in entries.items():
            held = {key, entry[0]} <= reserved.get(name, set())
            if now[name].get(key) != entry and not (key not in now[name] and held):
                found.append(f"{name}: {key} was {entry}, and is {now[name].get(key, 'gone and not reserved')}")
    return found


def main() -> int:
    promised = json.loads(FILE.read_text()) if FILE.exists() else {}
    now, reserved = current()
    if mistakes := broken(promised, now, reserved):
        print("\n".join(mistakes))
        return 1
    if "--extend" in sys.argv[1:]:
        FILE.write_text(json.dumps({**promised, **now}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
