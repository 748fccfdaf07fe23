from __future__ import annotations

import numpy as np
import pytest

from fairfleet.server.aggregation import aggregate
from fairfleet.server.conflict_map import MOST_CLIENTS, ConflictMap
from fairfleet.server.rules import Report, recipe

LAYERS = (3, 5)
DRAW = np.random.default_rng(7)
ROWS = {name: DRAW.standard_normal(8) for name in ("ann", "bob", "cyd")}
REPORTS = {name: Report(samples=10, loss=1.0) for name in ROWS}


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_cosines_are_those_of_the_updates_over_the_model_and_in_each_layer() -> None:
    out = aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=LAYERS)
    found, rows = out.diagnostics.conflict_map, np.array(list(ROWS.values()))
    assert found is not None
    assert found.clients == ("ann", "bob", "cyd")
    for layer, part in ((None, slice(0, 8)), (0, slice(0, 3)), (1, slice(3, 8))):
        updates, direction = unit(rows[:, part]), unit(out.step[part])
        np.testing.assert_allclose(found.cosines(layer), updates @ updates.T, atol=1e-6)
        np.testing.assert_allclose(found.with_direction(layer), updates @ direction, atol=1e-6)
    harmed = [sum(unit(rows[:, part]) @ unit(out.step[part]) < 0) for part in (slice(0, 3), slice(3, 8))]
    assert found.disagreement() == harmed == [len(names) for names in out.diagnostics.layer_conflicts]


def test_a_round_of_too_many_clients_has_no_map() -> None:
    rows = {f"client-{k}": np.ones(2) for k in range(MOST_CLIENTS + 1)}
    reports = {name: Report(samples=10, loss=1.0) for name in rows}
    assert aggregate(np.zeros(2), rows, reports, recipe("fedavg")).diagnostics.conflict_map is None


def test_an_update_of_zero_has_no_cosine_with_anybody() -> None:
    gram = np.array([[[0.0, 0.0], [0.0, 4.0]]])
    found = ConflictMap.of(0, ["ann", "bob"], gram, np.zeros((1, 2)), np.zeros(2))
    assert found is not None
    assert found.cosines().tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_the_map_is_not_in_the_record() -> None:
    out = aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=LAYERS)
    assert "conflict_map" not in out.diagnostics.model_dump(mode="json")


@pytest.mark.parametrize("rule", ["median", "fedlf"])
def test_every_kind_of_rule_has_a_map(rule: str) -> None:
    found = aggregate(np.zeros(8), ROWS, REPORTS, recipe(rule), layers=LAYERS).diagnostics.conflict_map
    assert found is not None
    assert np.isfinite(found.cosines(1)).all()


def test_maps_are_equal_when_every_number_is() -> None:
    one, same = (aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=LAYERS).diagnostics for _ in range(2))
    other = aggregate(np.zeros(8), ROWS, REPORTS, recipe("fedavg"), layers=(4, 4)).diagnostics
    assert one.conflict_map == same.conflict_map
    assert one.conflict_map != other.conflict_map
