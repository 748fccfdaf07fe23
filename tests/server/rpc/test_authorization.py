"""The table of permissions has a row for every call, and no role has more than it needs."""

from __future__ import annotations

import pytest

from fairfleet.common.errors import NotAllowed
from fairfleet.common.pki.identity import NOBODY, Identity, Role
from fairfleet.server.rpc.authorization import TABLE, allow
from tests.support.calls import every_call

ANN, OLGA = Identity(Role.CLIENT, "ann"), Identity(Role.OPERATOR, "olga")


def may(method: str, who: Identity) -> bool:
    try:
        allow(method, who)
    except NotAllowed:
        return False
    return True


def test_every_call_has_a_row_and_every_row_a_call() -> None:
    assert len(every_call()) >= 24
    missing = set(every_call()) - set(TABLE)
    assert not missing, f"nobody may call {missing}: give them a row in server/rpc/authorization.py"
    # An older grpcio-health-checking has no List.
    assert set(TABLE) - set(every_call()) <= {"/grpc.health.v1.Health/List"}


@pytest.mark.parametrize("method", every_call())
def test_a_call_is_allowed_to_one_or_both_roles_and_never_to_all(method: str) -> None:
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
    permissions = tuple(may(method, who) for who in (ANN, OLGA, NOBODY))
    assert permissions == (special.get(method) or expected[service])


def test_a_call_without_a_row_is_refused_for_every_role() -> None:
    for who in (ANN, OLGA, NOBODY):
        with pytest.raises(NotAllowed):
            allow("/fairfleet.v1.Fleet/Anything", who)


def test_a_client_with_the_name_operator_is_a_client() -> None:
    with pytest.raises(
        NotAllowed, match=r"needs a certificate of operator; this is client operator's"
    ):
        allow("/fairfleet.v1.Operator/Stop", Identity(Role.CLIENT, "operator"))
