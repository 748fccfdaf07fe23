"""Which losses the settings request of clients, and which combinations they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fairfleet.server.rounds.loss_measurement import LossSettings
from fairfleet.server.settings import ServerSettings

PRIVATE = {"clip": 1.0, "noise_multiplier": 1.0, "where": "client"}


def settings(tmp_path: Path, **fields: Any) -> ServerSettings:
    return ServerSettings.model_validate({"state_dir": tmp_path, "name": "test", **fields})


@pytest.mark.parametrize(
    ("fields", "after"),
    [
        ({}, "none"),
        ({"rule": "after"}, "exact"),
        ({"rule": "after", "after": "sampled"}, "sampled"),
        ({"after": "exact"}, "exact"),
    ],
)
def test_a_loss_after_training_is_measured_if_the_rule_receives_it(
    fields: dict[str, str], after: str
) -> None:
    plan = LossSettings.model_validate(fields).plan(used=True)
    assert (plan.before, plan.after) == ("exact", after)
    assert plan.samples == (1000 if after == "sampled" else 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rule": {"name": "fedmdfg"}}, "line search"),
        ({"verification": {}}, "verification"),
        ({"privacy": {**PRIVATE, "reports": "noised"}}, "noised reports"),
    ],
)
def test_a_rule_cannot_receive_losses_after_training_where_they_would_be_misread(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    settings(tmp_path, **fields)
    with pytest.raises(ValidationError, match=rf"losses\.rule: after.*{words}"):
        settings(tmp_path, losses={"rule": "after"}, **fields)


def test_a_federation_whose_reports_are_not_noised_may_use_losses_after_training(
    tmp_path: Path,
) -> None:
    privacy = {**PRIVATE, "reports": "uncovered"}
    chosen = settings(tmp_path, privacy=privacy, losses={"rule": "after"})
    assert chosen.loss_plan.after == "exact"
