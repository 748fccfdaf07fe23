from __future__ import annotations

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.conflict_map import MAX_CLIENTS, ConflictMap
from fairfleet.server.rules import Report, recipe

LAYERS = (3, 5)
DRAW = np.random.default_rng(7)
ROWS = {name: DRAW.standard_normal(8) for name in ("ann", "bob", "cyd")}
REPORTS = {name: Report(samples=10, loss=1.0) for name in ROWS}


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_cosines_are_those_of_the_updates_over_the_model_and_in_each_layer() -> None:
    out = aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=LAYERS)
    conflict_map, rows = out.diagnostics.conflict_map, np.array(list(ROWS.values()))
    assert conflict_map is not None
    assert conflict_map.clients == ("ann", "bob", "cyd")
    for layer, part in ((None, slice(0, 8)), (0, slice(0, 3)), (1, slice(3, 8))):
        updates, direction = unit(rows[:, part]), unit(out.step[part])
        np.testing.assert_allclose(conflict_map.cosines(layer), updates @ updates.T, atol=1e-6)
        np.testing.assert_allclose(
            conflict_map.with_direction(layer), updates @ direction, atol=1e-6
        )
    harmed = [
        sum(unit(rows[:, part]) @ unit(out.step[part]) < 0) for part in (slice(0, 3), slice(3, 8))
    ]
    assert (
        conflict_map.disagreement()
        == harmed
        == [len(names) for names in out.diagnostics.layer_conflicts]
    )


def test_a_round_of_too_many_clients_has_no_map() -> None:
    rows = {f"client-{k}": np.ones(2) for k in range(MAX_CLIENTS + 1)}
    reports = {name: Report(samples=10, loss=1.0) for name in rows}
    assert aggregate(np.zeros(2), rows, reports, recipe("fedavg")).diagnostics.conflict_map is None


def test_a_zero_update_has_no_cosine_with_any_other() -> None:
    gram = np.array([[[0.0, 0.0], [0.0, 4.0]]])
    conflict_map = ConflictMap.of(0, ["ann", "bob"], gram, np.zeros((1, 2)), np.zeros(2))
    assert conflict_map is not None
    assert conflict_map.cosines().tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_the_map_is_not_in_the_record() -> None:
    out = aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=LAYERS)
    assert "conflict_map" not in out.diagnostics.model_dump(mode="json")


@pytest.mark.parametrize("rule", ["median", "fedlf"])
def test_every_kind_of_rule_has_a_map(rule: str) -> None:
    result = aggregate(
        np.zeros(8), ROWS, REPORTS, recipe(rule), layers=LAYERS
    ).diagnostics.conflict_map
    assert result is not None
    assert np.isfinite(result.cosines(1)).all()


def test_maps_are_equal_if_every_number_is_equal() -> None:
    first, same = (
        aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=LAYERS).diagnostics
        for _ in range(2)
    )
    other = aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=(4, 4)).diagnostics
    assert first.conflict_map == same.conflict_map
    assert first.conflict_map != other.conflict_map
