"""The record of a step, computed from inner products, agrees with the vectors."""

import doctest
import json
from importlib import import_module

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.results import Outcome
from fairfleet.server.rules import Report, recipe

ROWS = {
    "ann": np.array([1.0, 0, 1, 1]),
    "bob": np.array([-3.0, 1, 1, -1]),
    "eve": np.array([1.0, 1, -1, 0.5]),
}


def outcome(name: str, **parameters: object) -> Outcome:
    reports = {client: Report(10 + k, 1.0 + k) for k, client in enumerate(ROWS)}
    return aggregate(np.zeros(4), ROWS, reports, recipe(name, **parameters), layers=[1, 3])


@pytest.mark.parametrize("name", ["fedavg", "fedmgda", "fedfv", "adafed", "fedlf"])
def test_decrease_cosine_length_and_conflicts_agree_with_the_vectors(name: str) -> None:
    out = outcome(name)
    d, about = out.step, out.diagnostics
    assert about.direction_norm == pytest.approx(np.linalg.norm(d))
    for client, row in ROWS.items():
        assert about.predicted_decrease[client] == pytest.approx(row @ d, abs=1e-12)
        cosine = row @ d / np.linalg.norm(row) / np.linalg.norm(d)
        assert about.cosines[client] == pytest.approx(cosine, abs=1e-12)
        assert (client in about.conflicts) == (cosine < -1e-9)
        for layer, part in enumerate((slice(0, 1), slice(1, 4))):
            harmed = row[part] @ d[part] < -1e-9 * np.linalg.norm(row[part]) * np.linalg.norm(
                d[part]
            )
            assert (client in about.layer_conflicts[layer]) == harmed


def test_fedavg_lists_harmed_clients_where_fedlf_harms_none() -> None:
    assert outcome("fedavg").diagnostics.layer_conflicts[0] != []
    fair = outcome("fedlf").diagnostics
    assert fair.conflicts == []
    assert len(fair.coefficients["ann"]) == 2  # one coefficient per layer


def test_cosines_between_clients_are_the_conflict_map() -> None:
    rows = np.array(list(ROWS.values()))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(
        outcome("fedavg").diagnostics.client_cosines, unit @ unit.T, atol=5e-5
    )


def test_the_record_is_json() -> None:
    for name in ("fedlf", "fedfv", "afl", "median", "fedmdfg"):
        record = json.loads(outcome(name).diagnostics.model_dump_json())
        assert record["rule"] == name
        assert record["status"] == "ok"


def test_column_rules_have_no_coefficients_to_show() -> None:
    about = outcome("median").diagnostics
    assert (about.coefficients, about.direction_norm, about.predicted_decrease) == ({}, None, {})


MODULES = [
    *(f"aggregation.{name}" for name in ("aggregator", "buffers", "history", "isolation")),
    *(f"gram.{name}" for name in ("engine", "pair_products")),
    *(f"rules.{name}" for name in ("solvers.min_norm", "registry")),
]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_documentation_are_true(module: str) -> None:
    result = doctest.testmod(import_module(f"fairfleet.server.{module}"))
    assert result.attempted
    assert not result.failed
