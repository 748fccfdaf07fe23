"""The table of who may call what has a row for every call there is, and none gives more than its role needs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import fairfleet.proto.v1
from fairfleet.common.errors import NotAllowed
from fairfleet.common.identity import NOBODY, Identity, Role
from fairfleet.server.authorization import TABLE, allow

ANN, OLGA = Identity(Role.CLIENT, "ann"), Identity(Role.OPERATOR, "olga")


def services() -> Iterator[ServiceDescriptor]:
    """Of every .proto file there is, so that a new one cannot be forgotten; and those of gRPC that we serve."""
    modules = [name for _, name, _ in pkgutil.iter_modules(fairfleet.proto.v1.__path__) if name.endswith("_pb2")]
    ours = [importlib.import_module(f"fairfleet.proto.v1.{name}") for name in modules]
    for module in (*ours, health_pb2, reflection_pb2):
        yield from module.DESCRIPTOR.services_by_name.values()


def every_call() -> list[str]:
    return [f"/{service.full_name}/{method.name}" for service in services() for method in service.methods]


def may(method: str, who: Identity) -> bool:
    try:
        allow(method, who)
    except NotAllowed:
        return False
    return True


def test_every_call_has_a_row_and_every_row_is_of_a_call() -> None:
    assert len(every_call()) >= 24
    missing = set(every_call()) - set(TABLE)
    assert not missing, f"nobody may call {missing}: give them a row in server/authorization.py"
    # An older grpcio-health-checking has no List.
    assert set(TABLE) - set(every_call()) <= {"/grpc.health.v1.Health/List"}


@pytest.mark.parametrize("method", every_call())
def test_a_call_is_for_one_role_or_for_both_and_never_for_all(method: str) -> None:
    service = method.split("/")[1]
    expected = {
        "fairfleet.v1.Fleet": (True, False, False),
        "fairfleet.v1.Operator": (False, True, False),
        "grpc.health.v1.Health": (True, True, False),
        "grpc.reflection.v1alpha.ServerReflection": (False, True, False),
    }
    special = {
        "/fairfleet.v1.Enrolment/Enrol": (False, False, True),
        "/fairfleet.v1.Enrolment/Renew": (True, True, False),
        "/grpc.health.v1.Health/Watch": (False, True, False),
    }
    found = tuple(may(method, who) for who in (ANN, OLGA, NOBODY))
    assert found == (special.get(method) or expected[service])


def test_a_call_without_a_row_is_nobodys() -> None:
    for who in (ANN, OLGA, NOBODY):
        with pytest.raises(NotAllowed):
            allow("/fairfleet.v1.Fleet/Anything", who)


def test_a_client_that_is_called_operator_is_a_client() -> None:
    with pytest.raises(NotAllowed, match=r"needs a certificate of operator; this is client operator's"):
        allow("/fairfleet.v1.Operator/Stop", Identity(Role.CLIENT, "operator"))
