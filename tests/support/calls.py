"""Every call of every gRPC service."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import fairfleet.proto.v1


def services() -> Iterator[ServiceDescriptor]:
    """Yield the services of all .proto files, and those of gRPC that the server offers."""
    modules = [
        name
        for _, name, _ in pkgutil.iter_modules(fairfleet.proto.v1.__path__)
        if name.endswith("_pb2")
    ]
    ours = [importlib.import_module(f"fairfleet.proto.v1.{name}") for name in modules]
    for module in (*ours, health_pb2, reflection_pb2):
        yield from module.DESCRIPTOR.services_by_name.values()


def every_call() -> list[str]:
    """Return the path of every call, such as /fairfleet.v1.Fleet/Join."""
    return [
        f"/{service.full_name}/{method.name}"
        for service in services()
        for method in service.methods
    ]
