"""Aggregation needs no memory of tensors x clients squared, unless rule or settings need it."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.rules import Report, recipe
from tests.support.paths import ROOT

BENCHMARK = ROOT / "benchmarks" / "aggregation_memory.py"


def measured(*words: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARK), *words]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "most_mb"), [("fedavg", 400), ("fedlf", 1000)])
def test_a_thousand_clients_with_62_tensors_fit_into_a_small_container(
    rule: str, most_mb: float
) -> None:
    line = measured("--clients", "1000", "--tensors", "62", "--params", "800", "--rules", rule)
    assert line["peak_rss_mb"] < most_mb
    assert line["diagnostics"] == "model"
    assert line["record_mb"] < 1.0


def test_the_memory_benchmark_runs_a_whole_round() -> None:
    line = measured("--clients", "20", "--tensors", "3", "--params", "30", "--rules", "fedlf")
    assert (line["diagnostics"], line["clients"], line["rule"]) == ("full", 20, "fedlf")
    assert 0 < line["rss_before_mb"] <= line["peak_rss_mb"] < 400


def peak_mb(rule: str, clients: int, layers: list[int], diagnostics: Any = "auto") -> float:
    """Return the least peak of a few runs: in the first ones, threads allocate workspaces."""
    return min(peak_of_one_mb(rule, clients, layers, diagnostics) for _ in range(4))


def peak_of_one_mb(rule: str, clients: int, layers: list[int], diagnostics: Any) -> float:
    draw = np.random.default_rng(0)
    names = [f"client {k:04d}" for k in range(clients)]
    rows = {name: draw.standard_normal(sum(layers)).astype(np.float32) for name in names}
    reports = {name: Report(samples=10, loss=1.0) for name in names}
    tracemalloc.start()
    work = Aggregation(recipe(rule), layers, expected=names, diagnostics=diagnostics)
    work.extend({name: rows[name] for name in reversed(names)})
    work.step(reports).diagnostics.record()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


@pytest.mark.slow
def test_products_per_layer_are_stored_once_and_only_if_requested() -> None:
    layers, clients = [1] * 200, 110  # products per layer: 19 MB; over the model: 0.1 MB
    products = len(layers) * clients**2 * 8 / 1e6
    assert peak_mb("fedavg", clients, layers, "model") < 0.7 * products
    assert peak_mb("fedavg", clients, layers, "off") < 0.2 * products
    assert products < peak_mb("fedavg", clients, layers, "full") < 1.8 * products
