"""Check that the .proto files stay compatible with everything the wire protocol has had so far.

    python proto/contract.py            prints incompatible changes; exits with 1 if there are any
    python proto/contract.py --extend   records additions; refuses while anything is incompatible

`contract.json` lists every message's fields by number (name, type, whether repeated), every enum's
values and every service's calls. Each of them must stay, or its number and name must be reserved,
because devices in the field use them.
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
    """Return the contract of the .proto files, and the reserved numbers and names per message."""
    contract: Contract = {}
    reserved: dict[str, set[str]] = {}
    for module in (model_pb2, fleet_pb2, operator_pb2, enrolment_pb2):
        file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for name, message in _messages(file):
            contract[name] = {str(field.number): _field(field) for field in message.field}
            numbers = {
                str(n) for span in message.reserved_range for n in range(span.start, span.end)
            }
            reserved[name] = numbers | set(message.reserved_name)
            contract.update((f"{name}.{enum.name}", _values(enum)) for enum in message.enum_type)
        contract.update((f"{file.package}.{enum.name}", _values(enum)) for enum in file.enum_type)
        for service in file.service:
            contract[f"{file.package}.{service.name}"] = {
                call.name: [
                    call.input_type,
                    call.client_streaming,
                    call.output_type,
                    call.server_streaming,
                ]
                for call in service.method
            }
    return contract, reserved


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    queue = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    while queue:
        name, message = queue.pop()
        yield name, message
        queue += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]


def _field(field: FieldDescriptorProto) -> list[Any]:
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return [field.name, FieldDescriptorProto.Type.Name(field.type), field.type_name, repeated]


def _values(enum: EnumDescriptorProto) -> dict[str, Any]:
    return {str(value.number): value.name for value in enum.value}


def broken(promised: Contract, now: Contract, reserved: dict[str, set[str]]) -> list[str]:
    """Return a line of text for every incompatible change."""
    changes = []
    for name, entries in promised.items():
        if name not in now:
            changes.append(f"{name} is gone")
            continue
        for key, entry in entries.items():
            is_reserved = {key, entry[0]} <= reserved.get(name, set())
            if now[name].get(key) != entry and not (key not in now[name] and is_reserved):
                current_entry = now[name].get(key, "gone and not reserved")
                changes.append(f"{name}: {key} was {entry}, and is {current_entry}")
    return changes


def main() -> int:
    """Check the contract, and extend it if asked to; return the exit code."""
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
