"""Measure the memory of a round's aggregation on the server, in one fresh process per rule.

    python benchmarks/aggregation_memory.py
    python benchmarks/aggregation_memory.py --clients 1000 --tensors 62 --params 800 --json

A real committer on a temporary state directory gets the updates in a shuffled order, in groups
that arrive together. It multiplies, aggregates and writes the record; then the round is committed
in memory. `peak_rss_mb` is the largest resident size of the process, Python and libraries included.
`rss_before_mb` is its resident size with all rows in memory and none multiplied. Peaks hardly vary
between runs, but are comparable only on the same machine with the same numpy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.federation.model_committer import CommitterOptions, ModelCommitter
from fairfleet.server.federation.staged_model import StepProposal
from fairfleet.server.rules import recipe
from fairfleet.server.storage.store import Store, StoredUpdate
from fairfleet.server.transfer.published_model import PublishedModel

BARS_MB = {"fedavg": 400.0, "fedlf": 1000.0}  # for BAR_SIZE
BAR_SIZE = (1000, 62, 800)  # clients, tensors, parameters of all tensors together
TOGETHER = 25  # updates that arrive together
Updates = dict[str, tuple[StoredUpdate, Model]]


def model_of(tensors: int, params: int) -> Model:
    """Return a model of ones with this many tensors and parameters in all."""
    sizes = [len(part) for part in np.array_split(np.arange(params), tensors)]
    return Model.of(
        {f"layer{index:04d}": np.ones(size, np.float32) for index, size in enumerate(sizes)}, {}
    )


def updates_for(model: Model, clients: int) -> Updates:
    """Return a random update and report for each client."""
    draw = np.random.default_rng(0)
    updates: Updates = {}
    for place in range(clients):
        row = Model.empty(model.signature)
        row.parameters[:] = draw.standard_normal(len(row.parameters)) + 0.5
        report = TrainReport(
            samples=int(draw.integers(1, 50)),
            loss_before=float(draw.uniform(0.1, 3)),
            loss_after=0.1,
            steps=5,
            learning_rate=0.1,
            gradient_norm=float(draw.uniform(1, 9)),
            accuracy=float(draw.uniform(0.1, 0.9)),
        )
        name = f"client-{place:05d}"
        updates[name] = (
            StoredUpdate(0, name, bytes(32), "raw32", row.parameters.nbytes, report, None),
            row,
        )
    return updates


def status_mb(field: str) -> float:
    """Return a memory field of this process's status (VmRSS, VmHWM) in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024 / 1e6


def measure(rule: str, clients: int, tensors: int, params: int, diagnostics: Any) -> dict[str, Any]:
    """Measure one round in this process, which must be fresh."""
    model = model_of(tensors, params)
    updates = updates_for(model, clients)
    arrival = np.random.default_rng(1).permutation(sorted(updates)).tolist()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
        store = Store(Path(folder) / "state")
        store.create("memory", model, PublishedModel.of(0, model).digest)
        committer = ModelCommitter.open(
            store, 0, recipe(rule), CommitterOptions(diagnostics=diagnostics)
        )
        before, began = status_mb("VmRSS"), time.perf_counter()
        for start in range(0, clients, TOGETHER):
            for client in arrival[start : start + TOGETHER]:
                committer.add(client, updates[client][1], updates)
            committer.multiply()
        last = time.perf_counter()
        result = committer.aggregate(updates, workers)
        committed = (
            committer.take(result, 1, updates, workers)
            if isinstance(result, StepProposal)
            else result
        )
        aggregated = time.perf_counter()
        committed.written.result()
        committer.adopt(committed, updates)
        store.close()
    return {
        "rule": rule,
        "clients": clients,
        "tensors": tensors,
        "params": params,
        "diagnostics": committed.record.diagnostics.get("level"),
        "seconds_multiply": round(last - began, 3),
        "seconds_aggregate": round(aggregated - last, 3),
        "record_mb": round(len(committed.record.to_json()) / 1e6, 3),
        "rows_mb": round(clients * params * 4 / 1e6, 3),
        "rss_before_mb": round(before, 1),
        "peak_rss_mb": round(status_mb("VmHWM"), 1),
    }


def lines(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one line of figures per rule, each from a fresh process."""
    for rule in given.rules:
        size = [
            f"--clients={given.clients}",
            f"--tensors={given.tensors}",
            f"--params={given.params}",
        ]
        command = [
            sys.executable,
            __file__,
            "--here",
            "--rules",
            rule,
            f"--diagnostics={given.diagnostics}",
            *size,
        ]
        line = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        if (given.clients, given.tensors, given.params) == BAR_SIZE and rule in BARS_MB:
            line["bar_peak_rss_mb"] = BARS_MB[rule]
        yield line


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=62)
    parser.add_argument(
        "--params", type=int, default=800, help="parameters of all tensors together"
    )
    parser.add_argument("--diagnostics", default="auto", choices=["auto", "full", "model", "off"])
    parser.add_argument("--rules", nargs="*", default=list(BARS_MB), help="rules to measure")
    parser.add_argument("--here", action="store_true", help="measure one rule in this process")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one object per line (always done)"
    )
    given = parser.parse_args()
    size = given.clients, given.tensors, given.params
    measurements = (
        [measure(given.rules[0], *size, given.diagnostics)] if given.here else lines(given)
    )
    for line in measurements:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
