"""The history stores each client's latest row, also on disk, and multiplies each pair once."""

from pathlib import Path

import numpy as np
import pytest

from fairfleet.server.aggregation import history as history_module
from fairfleet.server.aggregation.aggregator import Aggregation, aggregate
from fairfleet.server.aggregation.history import History, InMemoryRows
from fairfleet.server.gram.engine import GramEngine
from fairfleet.server.rules import PastRow, Report, recipe
from fairfleet.server.storage.files.history_files import FileRows

LAYERS = [30, 70]


def row(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(100).astype(np.float32)


@pytest.fixture(params=["memory", "folder"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> InMemoryRows | FileRows:
    return InMemoryRows() if request.param == "memory" else FileRows(tmp_path / "history")


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_latest_row_of_each_client_is_stored(
    shelf: InMemoryRows | FileRows, precision: str
) -> None:
    history = History(LAYERS, shelf, precision)
    assert history.put("ann", 3, row(0))
    assert history.put("ann", 5, row(1))
    assert not history.put("ann", 4, row(2))  # late, and older than the stored row
    assert not history.put("ann", 5, row(2))
    assert history.rows() == {"ann": PastRow("ann", 5)}
    np.testing.assert_array_equal(history.row("ann"), row(1).astype(precision))


def test_the_row_is_a_copy(shelf: InMemoryRows | FileRows) -> None:
    mine, history = row(0), History(LAYERS, shelf)
    history.put("ann", 0, mine)
    mine[:] = 0
    np.testing.assert_array_equal(history.row("ann"), row(0))


def test_products_are_those_of_the_stored_rows(shelf: InMemoryRows | FileRows) -> None:
    history = History(LAYERS, shelf, "float16")
    for k in range(4):
        history.put(f"c{k}", k, row(k))
    wide = np.array([history.row(f"c{k}") for k in range(4)]).astype(np.float64)
    products = history.products([f"c{k}" for k in range(4)])
    np.testing.assert_allclose(products[0], wide[:, :30] @ wide[:, :30].T, rtol=1e-12)
    np.testing.assert_allclose(products[1], wide[:, 30:] @ wide[:, 30:].T, rtol=1e-12)


def test_each_pair_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []

    class Counting(GramEngine):
        def extend(self, rows):  # type: ignore[no-untyped-def]
            added.extend(rows)
            super().extend(rows)

    monkeypatch.setattr(history_module, "GramEngine", Counting)
    history, clients = History(LAYERS), ["a", "b", "c"]
    for k, client in enumerate(clients):
        history.put(client, 0, row(k))
    first = history.products(clients)
    np.testing.assert_array_equal(history.products(clients), first)
    assert added == clients
    history.put("b", 1, row(9))
    history.products(clients)
    assert added == [*clients, "b"]


def test_only_rows_within_the_window_are_used() -> None:
    history = History(LAYERS)
    for client, round_number in (("old", 1), ("two", 8), ("one", 9), ("now", 10)):
        history.put(client, round_number, row(round_number))
    assert history.within(10, 2) == ["one", "two"]
    assert history.within(10, 0) == []


def test_rows_on_disk_are_loaded_after_a_restart(tmp_path: Path) -> None:
    history = History(LAYERS, FileRows(tmp_path))
    history.put("ann/../x @ 1", 3, row(0))  # ids become file names only after quoting
    history.put("bob", 4, row(1))
    history.put("bob", 7, row(2))
    history.discard("gone")
    again = History(LAYERS, FileRows(tmp_path))
    assert again.rows() == {"ann/../x @ 1": PastRow("ann/../x @ 1", 3), "bob": PastRow("bob", 7)}
    np.testing.assert_array_equal(again.row("bob"), row(2))
    assert len(list(tmp_path.iterdir())) == 2
    assert isinstance(again.row("bob"), np.memmap)


def test_a_crash_between_two_files_leaves_the_newer_row(tmp_path: Path) -> None:
    folder = FileRows(tmp_path)
    folder.put(PastRow("ann", 7), row(1))
    folder.put(PastRow("ann", 3), row(0))
    assert History(LAYERS, folder).rows() == {"ann": PastRow("ann", 7)}


def test_the_row_of_a_discarded_client_is_deleted(shelf: InMemoryRows | FileRows) -> None:
    history = History(LAYERS, shelf)
    history.put("ann", 0, row(0))
    history.discard("ann")
    assert len(history) == 0
    assert list(shelf.stored()) == []


def test_a_row_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(7,\); expected \(100,\)"):
        History(LAYERS).put("ann", 0, np.zeros(7, np.float32))


def play(
    name: str, history: History, **parameters: object
) -> tuple[list[bytes], list[dict[str, object]]]:
    """Run eight rounds in which two of six clients take part in turn."""
    rule_recipe, state, models, used = recipe(name, **parameters), None, [], []
    model = np.zeros(100, np.float32)
    for t in range(8):
        present = [f"c{k}" for k in ((2 * t) % 6, (2 * t + 1) % 6)]
        rows = {client: row(10 * t + k) for k, client in enumerate(present)}
        aggregation = Aggregation(
            rule_recipe, LAYERS, round_number=t, history=history, expected=present
        )
        aggregation.extend(rows)
        out = aggregation.finish(
            model, {client: Report(10, 0.5 + k + t) for k, client in enumerate(present)}, state
        )
        aggregation.remember(rows)
        model, state = out.model, out.state
        models.append(model.tobytes())
        used.append(out.diagnostics.history_coefficients)
    return models, used


@pytest.mark.parametrize(
    ("name", "parameters"), [("fedfv", {"tau": 2}), ("fedlf", {}), ("fedmdfg", {})]
)
def test_absent_clients_take_part_and_memory_or_disk_makes_no_difference(
    name: str, parameters: dict[str, object], tmp_path: Path
) -> None:
    models, used = play(name, History(LAYERS), **parameters)
    assert any(any(np.any(value) for value in coefficients.values()) for coefficients in used)
    assert play(name, History(LAYERS, FileRows(tmp_path)), **parameters)[0] == models


def test_an_expected_client_that_drops_out_is_stood_in_for_by_its_history_row() -> None:
    """With and without early notice the history rows are the same, and so is the model."""
    history = History(LAYERS)
    for k in range(5):
        history.put(f"c{k}", 9, row(k))
    rows = {"c0": row(20), "c1": row(21)}
    reports = {client: Report(10, 1.0 + k) for k, client in enumerate(rows)}
    outs = []
    for expected in (["c0", "c1"], ["c0", "c1", "c2"], []):
        aggregation = Aggregation(
            recipe("fedlf"), LAYERS, round_number=10, history=history, expected=expected
        )
        aggregation.extend(rows)
        outs.append(aggregation.finish(np.zeros(100, np.float32), reports))
    assert set(outs[0].diagnostics.notes["hist_used"]) == {"c2", "c3", "c4"}
    assert outs[0].model.tobytes() == outs[1].model.tobytes() == outs[2].model.tobytes()


def test_history_of_present_clients_is_not_used() -> None:
    history = History(LAYERS)
    history.put("c0", 9, row(5))
    rows = {"c0": row(0), "c1": row(1)}
    reports = {client: Report(10, 1.0 + k) for k, client in enumerate(rows)}
    with_past = aggregate(
        np.zeros(100, np.float32),
        rows,
        reports,
        recipe("fedfv", tau=1),
        layers=LAYERS,
        round_number=10,
        history=history,
    )
    without = aggregate(
        np.zeros(100, np.float32),
        rows,
        reports,
        recipe("fedfv", tau=1),
        layers=LAYERS,
        round_number=10,
    )
    assert with_past.model.tobytes() == without.model.tobytes()
