"""Protocol versions and features: what both sides speak, and what a plan requires."""

from __future__ import annotations

import re

import pytest

from fairfleet.common.errors import WrongState
from fairfleet.common.features import (
    CLIENT_FEATURES,
    FEATURES,
    OPTIONAL_PLAN_FEATURES,
    PLAN_FEATURES,
    PLAN_FIELDS_OF_VERSION_1,
    SERVER_FEATURES,
    VersionRange,
    check_spoken,
    newest_common,
    plan_features,
    unknown_to_client,
)
from fairfleet.common.training_plan import Plan
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.federation.clients.feature_requirements import required_features
from tests.support.paths import ROOT


def test_every_field_of_a_plan_is_of_version_1_or_has_a_feature() -> None:
    """Without a feature, older clients would ignore a new field and train something else."""
    fields = {field.name for field in pb.Plan.DESCRIPTOR.fields}
    assert fields == PLAN_FIELDS_OF_VERSION_1 | PLAN_FEATURES.keys()
    assert not PLAN_FIELDS_OF_VERSION_1 & PLAN_FEATURES.keys()
    applied_by_the_server = {"learning_rate_decay"}
    assert Plan.model_fields.keys() - applied_by_the_server <= fields


def test_the_page_of_features_lists_the_names_that_the_code_knows() -> None:
    page = (ROOT / "proto" / "FEATURES.md").read_text()
    assert tuple(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == FEATURES
    assert {*CLIENT_FEATURES, *SERVER_FEATURES, *PLAN_FEATURES.values()} <= {*FEATURES}


def test_a_later_field_of_a_plan_requires_its_feature_unless_it_may_be_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PLAN_FEATURES, "warmup_steps", "warmup")
    assert plan_features({"epochs", "warmup_steps"}) == {"warmup"}
    optional = {field for field, name in PLAN_FEATURES.items() if name in OPTIONAL_PLAN_FEATURES}
    assert plan_features(optional | PLAN_FIELDS_OF_VERSION_1) == frozenset()


def test_a_decay_requires_nothing_of_clients_because_the_server_applies_it() -> None:
    plan = Plan(steps=3, momentum=0.5)
    decaying = plan.model_copy(update={"learning_rate_decay": 0.5})
    assert required_features(decaying) == required_features(plan)


@pytest.mark.parametrize(
    ("own", "other", "chosen"),
    [((1, 3), (1, 3), 3), ((1, 3), (2, 9), 3), ((1, 3), (4, 9), None), ((4, 5), (1, 3), None)],
)
def test_the_newest_version_that_both_sides_speak_is_chosen(
    own: tuple[int, int], other: tuple[int, int], chosen: int | None
) -> None:
    assert newest_common(VersionRange(*own), VersionRange(*other)) == chosen
    assert newest_common(VersionRange(*other), VersionRange(*own)) == chosen


def test_a_client_refuses_a_version_that_it_does_not_speak() -> None:
    check_spoken("here:1", 0)
    check_spoken("here:1", 1)
    with pytest.raises(WrongState, match="server here:1 answered with protocol version 9"):
        check_spoken("here:1", 9)


def test_a_client_names_the_required_features_that_it_lacks() -> None:
    assert unknown_to_client([*CLIENT_FEATURES]) == []
    assert unknown_to_client(["telepathy", *CLIENT_FEATURES, "flight"]) == ["flight", "telepathy"]
