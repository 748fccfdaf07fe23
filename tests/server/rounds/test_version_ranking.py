"""Which of several evaluated versions is the best."""

from __future__ import annotations

from fairfleet.common.reports import Evaluation, lower
from fairfleet.server.rounds.version_ranking import (
    best_version,
    chosen_measure,
    version_scores,
)


def scores(*accuracies: float) -> dict[str, object]:
    return dict(
        version_scores(
            Evaluation(samples=1, accuracy=value, loss=1 - value) for value in accuracies
        )
    )


def test_the_version_that_serves_the_worst_tenth_best_is_the_best() -> None:
    """Version 1 has the better mean, version 2 the better worst client."""
    by_version = {1: scores(0.9, 0.9, 0.1), 2: scores(0.5, 0.5, 0.4)}
    assert best_version(by_version, "accuracy") == 2
    assert best_version(by_version, "loss") == 2


def test_of_versions_that_serve_the_worst_tenth_alike_the_better_mean_counts() -> None:
    assert best_version({1: scores(0.9, 0.4), 2: scores(0.5, 0.4)}, "accuracy") == 1


def test_of_equal_versions_the_earliest_is_the_best() -> None:
    assert best_version({4: scores(0.5), 2: scores(0.5), 3: scores(0.5)}, "accuracy") == 2


def test_accuracy_is_the_measure_where_anybody_reports_it_and_loss_elsewhere() -> None:
    with_accuracy = version_scores([Evaluation(samples=1, loss=2.0, accuracy=0.5)])
    without = version_scores([Evaluation(samples=1, loss=0.1)])
    assert chosen_measure([without, with_accuracy]) == "accuracy"
    assert chosen_measure([without]) == "loss"
    assert chosen_measure([{}]) is None


def test_a_version_without_the_measure_is_never_the_best() -> None:
    without = version_scores([Evaluation(samples=1, loss=0.0)])
    assert best_version({1: without, 2: scores(0.1)}, "accuracy") == 2
    assert best_version({1: without}, "accuracy") is None


def test_a_measure_of_which_lower_is_better_ranks_the_other_way_round() -> None:
    good, bad = (
        version_scores([Evaluation(samples=1, measures={"mae": lower(value)})])
        for value in (2.0, 3.0)
    )
    assert best_version({1: bad, 2: good}, "mae") == 2
