"""Which measure compares versions, and which stopping rules can never apply."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fairfleet.common.errors import BadRequest
from fairfleet.common.reports import Evaluation, higher, lower
from fairfleet.server.rounds.stopping import StopConditions
from fairfleet.server.rounds.version_scores import MAX_NAMES, VersionScores
from fairfleet.server.settings import ServerSettings

PLATEAU, TARGET = StopConditions(plateau=2), StopConditions(worst_10_percent=0.5)


def scores_of(*evaluations: Evaluation, setting: str = "auto") -> VersionScores:
    scores = VersionScores(setting)
    for number, evaluation in enumerate(evaluations):
        scores.add(number // 2 + 1, f"client-{number}", evaluation)
    return scores


def named(**measures: float) -> Evaluation:
    return Evaluation(samples=1, measures={name: higher(v) for name, v in measures.items()})


def test_auto_is_the_accuracy_of_most_clients_then_the_loss_then_the_only_measure() -> None:
    both, loss = Evaluation(samples=1, loss=1.0, accuracy=0.5), Evaluation(samples=1, loss=1.0)
    assert scores_of().measure == ""
    assert scores_of(both, loss).measure == "accuracy"
    assert scores_of(both, loss, loss).measure == "loss"  # one client of three decides nothing
    assert scores_of(named(auc=0.5)).measure == "auc"
    assert scores_of(named(auc=0.5, f1=0.5)).measure == ""


def test_the_worst_tenth_of_a_lower_measure_has_the_highest_values() -> None:
    errors = [Evaluation(samples=1, measures={"mae": lower(v)}) for v in (1.0, 3.0, 2.0, 2.5)]
    assert scores_of(*errors, setting="mae").worst_tenths() == [3.0, 2.5]


def test_a_rule_on_a_measure_that_nobody_reports_can_never_apply() -> None:
    assert scores_of(setting="f1").why_never(PLATEAU) == ""  # nothing is known yet
    assert "no client reports f1; reported: auc" in scores_of(
        named(auc=0.5), setting="f1"
    ).why_never(PLATEAU)
    assert scores_of(named(auc=0.5), setting="auc").why_never(PLATEAU) == ""
    assert scores_of(named(auc=0.5), setting="f1").why_never(StopConditions()) == ""
    either = scores_of(named(auc=0.5, f1=0.5))
    assert "no client reports an accuracy or a loss" in either.why_never(PLATEAU)


def test_a_target_of_auto_is_one_of_the_accuracy_and_never_becomes_one_of_the_loss() -> None:
    loss = scores_of(Evaluation(samples=1, loss=0.1))
    assert loss.why_never(PLATEAU) == ""
    assert "end.worst_10_percent can never apply: no client reports accuracy" in loss.why_never(
        TARGET
    )


def test_the_first_recorded_direction_stands() -> None:
    scores = scores_of(named(auc=0.5))
    other = Evaluation(samples=1, measures={"auc": lower(0.5)})
    with pytest.raises(BadRequest, match=r"client bob reports auc .* lower values are better"):
        scores.accepted("bob", other)
    personal = Evaluation(samples=1, loss=1.0, personal_measures={"auc": lower(0.5)})
    with pytest.raises(BadRequest, match="higher values of auc are"):
        scores.accepted("bob", personal)
    assert scores.accepted("bob", named(auc=0.4)) == named(auc=0.4)


def test_names_beyond_the_bound_are_left_out_but_the_chosen_one_is_not() -> None:
    scores = scores_of(*(named(**{f"m{k}": 0.5}) for k in range(MAX_NAMES)), setting="auc")
    kept = scores.accepted("ann", named(auc=0.9, another=0.1, m3=0.2))
    assert set(kept.measures) == {"auc", "m3"}
    with pytest.raises(BadRequest, match="report 64 measures already"):
        scores.accepted("ann", named(another=0.1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"measure": "AUC"}, "'AUC' cannot name a measure"),
        ({"end": {"worst_10_percent": 80}}, "an accuracy lies between 0 and 1"),
        ({"end": {"plateau": 2}, "round": {"evaluate_every": 0}}, "end.plateau needs evaluations"),
        (
            {"evaluation": {"task": "a:b"}, "round": {"evaluate_every": 0}},
            "evaluation.task needs evaluation.every",
        ),
    ],
)
def test_settings_that_can_never_work_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ServerSettings.model_validate(settings)


def test_a_target_of_another_measure_is_in_its_own_unit() -> None:
    settings = {"measure": "mae", "end": {"worst_10_percent": 80}}
    assert ServerSettings.model_validate(settings).end.worst_10_percent == 80
