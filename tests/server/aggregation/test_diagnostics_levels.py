"""Levels of diagnostics: unrequested figures are not computed, and no level changes a step."""

from __future__ import annotations

import doctest
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.common.errors import Bug
from fairfleet.server.aggregation import diagnostics as diagnostics_module
from fairfleet.server.aggregation.admission import AdmissionContext, AdmissionSettings
from fairfleet.server.aggregation.aggregator import Aggregation, aggregate
from fairfleet.server.aggregation.conflict_map import MAX_CLIENTS, MAX_PRODUCTS
from fairfleet.server.aggregation.diagnostics import level_for
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.results import ServerState
from fairfleet.server.gram import Detail, Gram, GramEngine, cancels
from fairfleet.server.rules import (
    Cohort,
    Needs,
    Recipe,
    Report,
    Rule,
    State,
    Step,
    listings,
    recipe,
)
from fairfleet.server.rules.weights.averaging import FedAvg
from tests.support.samples.reports import some_report
from tests.support.samples.torch_kernels import torch_kernel

LEVELS = ("full", "model", "off")
LAYERS = [5, 33, 1, 70, 2, 9, 13, 40, 11, 6]
SIZE = sum(LAYERS)
PARAMETERS: dict[str, dict[str, Any]] = {
    "fedfv": {"tau": 2},
    "adafed": {"absent": "history"},
    "fedmgda_plus": {"absent": "history"},
}


def some_rounds(
    rule_recipe: Recipe, level: Any, rounds: int = 3
) -> tuple[list[bytes], list[Any], list[Aggregation]]:
    """Return steps, states and aggregations of rounds with clipping and absent clients."""
    history = History(LAYERS)
    state, steps, remembered, aggregations = ServerState(), [], [], []
    gate = AdmissionContext(AdmissionSettings(norm="clip"))
    for number in range(rounds):
        draw = np.random.default_rng(number)
        clients = sorted(draw.permutation([f"client {k:02d}" for k in range(20)])[:14].tolist())
        rows = {client: draw.standard_normal(SIZE).astype(np.float32) for client in clients}
        rows[clients[3]] *= 40.0  # this update is clipped
        reports = {client: some_report(draw) for client in clients}
        work = Aggregation(
            rule_recipe,
            LAYERS,
            round_number=number,
            history=history,
            expected=clients,
            admission=gate,
            diagnostics=level,
        )
        for client in draw.permutation(clients).tolist():
            work.add(client, rows[client])
        aggregated = work.step(reports, state)
        state = aggregated.state
        work.remember({client: rows[client] for client in aggregated.reports}, reports)
        steps.append(aggregated.vector.tobytes())
        moments = (
            {name: v.tobytes() for name, v in aggregated.state.optimizer.vectors.items()}
            if state.optimizer
            else {}
        )
        numbers = aggregated.state.optimizer.numbers if aggregated.state.optimizer else {}
        remembered.append(
            (
                aggregated.state.rule,
                moments,
                numbers,
                aggregated.rate,
                aggregated.diagnostics.status,
            )
        )
        aggregations.append(work)
    return steps, remembered, aggregations


@pytest.mark.parametrize("name", list(listings()))
def test_no_level_changes_a_bit_of_any_rules_step_or_state(name: str) -> None:
    rule_recipe = recipe(name, **PARAMETERS.get(name, {}))
    steps, remembered, _ = some_rounds(rule_recipe, "full")
    for level in ("model", "off", "auto"):
        assert some_rounds(rule_recipe, level)[:2] == (steps, remembered), level


def without_history(
    rule_recipe: Recipe, level: Any, clients: int = 300
) -> tuple[bytes, Aggregation]:
    """Return this many clients whose updates differ so much that a mean needs float64 sums."""
    draw = np.random.default_rng(5)
    rows = {
        f"client {k:03d}": draw.standard_normal(SIZE).astype(np.float32) for k in range(clients)
    }
    reports = {client: some_report(draw) for client in rows}
    work = Aggregation(rule_recipe, LAYERS, expected=sorted(rows), diagnostics=level)
    work.extend(rows)
    return work.step(reports).vector.tobytes(), work


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavg_n", "qfedavg", "fednova", "fedfa", "median", "adafedadam"]
)
def test_a_rule_without_products_gets_only_norms_and_the_same_step(name: str) -> None:
    results = {level: without_history(recipe(name), level) for level in LEVELS}
    assert results["full"][0] == results["model"][0] == results["off"][0]
    details = [results[level][1].engine.detail for level in LEVELS]
    assert details == [Detail.LAYERS, Detail.WHOLE, Detail.NORMS]


@pytest.mark.parametrize(("name", "least"), [("fedmgda", Detail.WHOLE), ("fedlf", Detail.LAYERS)])
def test_products_that_the_rule_needs_are_computed_at_every_level(name: str, least: Detail) -> None:
    for level in LEVELS:
        assert without_history(recipe(name), level, clients=6)[1].engine.detail >= least
    assert without_history(recipe(name), "off", clients=6)[1].engine.detail is least


def test_auto_is_full_within_the_conflict_maps_limit_then_model_then_off() -> None:
    blocks = 62
    most = int((MAX_PRODUCTS / blocks) ** 0.5)
    assert [level_for("auto", clients, blocks) for clients in (most, most + 1)] == ["full", "model"]
    assert [level_for("auto", clients, 1) for clients in (2000, 2001)] == ["full", "off"]
    assert {level_for(level, 10**6, 10**6) for level in LEVELS} == set(LEVELS)
    assert not doctest.testmod(diagnostics_module).failed


@pytest.mark.slow
def test_a_round_too_large_for_a_level_continues_at_the_next_with_equal_bits() -> None:
    layers, draw = [1] * 1000, np.random.default_rng(0)
    rows = {f"client {k:02d}": draw.standard_normal(1000).astype(np.float32) for k in range(64)}
    reports = {client: some_report(draw) for client in rows}
    growing, expected = (
        Aggregation(recipe("fedmgda"), layers, expected=names) for names in ([], sorted(rows))
    )
    assert (growing.level, expected.level) == (
        "full",
        "model",
    )  # 63 squared x 1000 is within the limit, 64 squared is not
    for client, row in rows.items():
        growing.add(client, row)
    expected.extend(rows)
    assert growing.level == "model"
    assert growing.engine.detail is expected.engine.detail is Detail.WHOLE
    assert growing.step(reports).vector.tobytes() == expected.step(reports).vector.tobytes()


def test_the_level_depends_on_the_selected_number_not_on_arrival_order() -> None:
    layers, names = [1] * 1000, [f"client {k:02d}" for k in range(64)]
    work = Aggregation(recipe("fedavg"), layers, expected=names[:2])
    work.add(names[0], np.ones(1000, np.float32))
    work.expect(names)  # other clients were selected later
    work.add(names[1], np.ones(1000, np.float32))
    assert work.step({name: Report(1, 1.0) for name in names}).diagnostics.level == "model"


# ---- reported figures ----------------------------------------------------------------------------


def recorded(name: str, level: Any, clients: int = 5) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    rows = {
        f"client {k:03d}": draw.standard_normal(SIZE).astype(np.float32) for k in range(clients)
    }
    reports = {client: some_report(draw) for client in rows}
    out = aggregate(
        np.zeros(SIZE, np.float32), rows, reports, recipe(name), layers=LAYERS, diagnostics=level
    )
    return json.loads(json.dumps(out.diagnostics.record()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "fedmgda"])
def test_figures_that_were_not_computed_are_absent_and_the_level_is_recorded(name: str) -> None:
    full, model, off = (recorded(name, level) for level in LEVELS)
    assert [record["level"] for record in (full, model, off)] == list(LEVELS)
    assert {"conflicts", "layer_conflicts", "client_cosines"} <= full.keys()
    assert "layer_conflicts" not in model
    assert model["conflicts"] == full["conflicts"]
    for key in ("predicted_decrease", "cosines"):
        assert model[key] == pytest.approx(full[key], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(model["client_cosines"], full["client_cosines"], atol=1e-4)
    assert not {"conflicts", "layer_conflicts", "client_cosines"} & off.keys()
    assert (off["predicted_decrease"], off["cosines"]) == ({}, {})
    for record in (model, off):
        assert record["direction_norm"] == pytest.approx(full["direction_norm"], rel=1e-6)
        for client, weight in record["coefficients"].items():
            assert weight == pytest.approx(np.mean(full["coefficients"][client]))


def test_cosines_between_clients_are_recorded_for_small_rounds_only() -> None:
    assert "client_cosines" not in recorded("fedavg", "full", MAX_CLIENTS + 1)
    assert len(recorded("fedavg", "model", MAX_CLIENTS)["client_cosines"]) == MAX_CLIENTS


# ---- rules of other packages ---------------------------------------------------------------------


class ReadsLayers(Rule):
    def step(self, cohort: Cohort, state: State) -> Step:
        return Step(np.ones(len(cohort)) / len(cohort.gram.layers))


class MadeFromFedAvg(FedAvg):
    def step(self, cohort: Cohort, state: State) -> Step:
        return Step(1.0 / np.diagonal(cohort.gram.whole))


class SaysItNeedsNone(Rule):
    def needs(self) -> Needs:
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        return Step(np.diagonal(cohort.gram.whole))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("rule", "words"), [(ReadsLayers(), "layers=True"), (SaysItNeedsNone(), "products=False")]
)
def test_a_rule_that_reads_unrequested_products_gets_an_error_at_every_level(
    level: Any, rule: Rule, words: str
) -> None:
    work = Aggregation(Recipe("mine", rule), [4], diagnostics=level)
    work.add("ann", np.ones(4, np.float32))
    with pytest.raises(Bug, match=words):
        work.step({"ann": Report(1, 1.0)})


@pytest.mark.parametrize("level", LEVELS)
def test_a_rule_derived_from_one_without_products_may_read_them(level: Any) -> None:
    work = Aggregation(Recipe("mine", MadeFromFedAvg()), [4], diagnostics=level)
    work.add("ann", np.full(4, 2.0, np.float32))
    np.testing.assert_array_equal(work.step({"ann": Report(1, 1.0)}).vector, np.full(4, 0.125))


# ---- the engine ----------------------------------------------------------------------------------


def rows_of(count: int, size: int = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("count", [1, 3, 14, 130])
def test_norms_and_products_have_the_same_bits_in_every_detail(count: int, torch: bool) -> None:
    layers = [3, 40_000, 1, 7] if count < 20 else LAYERS
    rows, names = rows_of(count, sum(layers)), list(range(count))
    if torch and count > 20:
        pytest.skip("slow on a processor")
    engines = {
        detail: GramEngine(layers, torch_kernel() if torch else None, detail=detail)
        for detail in Detail
    }
    for engine in engines.values():
        for start in range(0, count, 7):
            engine.extend({k: rows[k] for k in names[start : start + 7]})
    full = engines[Detail.LAYERS]
    products = full.gram(names, Detail.WHOLE).whole
    assert products.tobytes() == full.gram(names).whole.tobytes()
    assert products.tobytes() == engines[Detail.WHOLE].gram(names).whole.tobytes()
    assert len({engine.norms(names).tobytes() for engine in engines.values()}) == 1
    assert (
        len({engine.gram(names, Detail.NORMS).norms.tobytes() for engine in engines.values()}) == 1
    )
    assert full.gram(names).norms.tobytes() == full.norms(names).tobytes()


def test_an_engine_that_is_reduced_in_the_middle_has_the_same_bits() -> None:
    rows, names = rows_of(30), list(range(30))
    reduced, norms = GramEngine(LAYERS), GramEngine(LAYERS)
    for engine in (reduced, norms):
        engine.extend({k: rows[k] for k in names[:11]})
    reduced.reduce(Detail.WHOLE)
    norms.reduce(Detail.NORMS)
    want = GramEngine(LAYERS)
    for engine in (reduced, norms, want):
        engine.extend({k: rows[k] for k in names if k not in engine})
    assert reduced.gram(names).whole.tobytes() == want.gram(names).whole.tobytes()
    assert norms.norms(names).tobytes() == want.norms(names).tobytes()


@given(st.permutations(range(6)), st.sampled_from([Detail.WHOLE, Detail.LAYERS]), st.integers(0, 9))
@settings(max_examples=30)
def test_arranged_products_are_the_same_and_not_copied(
    order: list[int], detail: Detail, expected: int
) -> None:
    rows = rows_of(8)
    engine, want = (GramEngine(LAYERS, detail=detail, expected=expected) for _ in range(2))
    for each in (engine, want):
        each.extend({k: rows[k] for k in range(6)})
    before = want.gram(order).blocks
    engine.arrange(order)
    blocks = engine.gram(order).blocks
    assert blocks.tobytes() == before.tobytes()
    assert np.shares_memory(blocks, engine.gram(order).blocks)
    engine.arrange(order[:3])  # only some rows: nothing is moved
    assert engine.gram(order[:3]).blocks.tobytes() == want.gram(order[:3]).blocks.tobytes()
    for each in (engine, want):  # and the engine continues
        each.extend({k: rows[k] for k in (6, 7)})
    assert engine.gram(range(8)).blocks.tobytes() == want.gram(range(8)).blocks.tobytes()
    assert (
        engine.combine(range(8), np.ones(8)).tobytes()
        == want.combine(range(8), np.ones(8)).tobytes()
    )


def test_the_history_keeps_products_in_the_detail_of_the_round() -> None:
    rows, history = rows_of(3), History(LAYERS)
    for k, row in enumerate(rows):
        history.put(f"client {k}", 0, row)
    clients = [f"client {k}" for k in range(3)]
    per_layer = history.products(clients)
    history.keep_blocks(1)
    products = history.products(clients)
    assert (per_layer.shape, products.shape) == ((len(LAYERS), 3, 3), (1, 3, 3))
    assert Gram(per_layer).whole.tobytes() == products[0].tobytes()


def test_layers_without_products_are_combined_in_float64() -> None:
    assert cancels(Gram(matrix=np.eye(2)), np.ones((3, 2))).tolist() == [True] * 3
    assert cancels(Gram(matrix=np.eye(2)), np.ones(2)).tolist() == [False]
