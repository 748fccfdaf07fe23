"""Measure the cost of a large history: many earlier clients, few present, many small tensors.

    python benchmarks/history.py --json
    python benchmarks/history.py --known 1000 --clients 100 --kinds independent common --json

The history contains the rows of `known` clients from past rounds, and the inner products of those
rows. Then `clients` updates arrive, from the same clients or, with --newcomers, from new ones. Each
line is one kind of rows. `step` covers everything between the arrival of the rows and the vector to
subtract: reading the history, inner products, the rule, the combination and diagnostics. `remember`
puts the round's rows into the history. The reference is numpy's G @ G.T of the same rows in
float64, tensor by tensor. Times are the best of several rounds.

Three kinds of rows are measured. `independent` rows point in all directions; no direction serves
every client, so FedLF tries all its fallbacks. `common` rows share a strong direction in every
tensor. `mixed` rows share a weak one, so FedLF merges some tensors.

Memory is measured with tracemalloc in a fresh process, without times. `history` is the memory of
the rows and products at the end of the round, plus the peak of `remember`. Its bar is
4 x rows + products, where products is the full float64 array (tensors, rows, rows). `step` is the
peak of the round, without the memory of the updates.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.aggregation.history import History
from fairfleet.server.gram.blocks import Row
from fairfleet.server.rules import Report, recipe

# Length of the shared direction per value, by kind of rows.
COMMON = {"independent": 0.0, "mixed": 0.4, "common": 4.0}
MB = 1e6
BARS = {"seconds_remember": 0.5, "seconds_step": 4.0, "ratio_history_memory_to_bar": 1.0}


class Size(NamedTuple):
    """The sizes of a measurement; their names are keys of the printed lines."""

    known: int  # clients in the history
    clients: int
    tensors: int
    values: int  # of each tensor
    newcomers: bool

    @property
    def layers(self) -> list[int]:
        """Return the number of values of each tensor."""
        return [self.values] * self.tensors

    @property
    def rows_bytes(self) -> int:
        """Return the size of the history's rows in float32."""
        return 4 * self.rows * self.tensors * self.values

    @property
    def products_bytes(self) -> int:
        """Return the size of the full float64 array of inner products."""
        return 8 * self.tensors * self.rows**2

    @property
    def rows(self) -> int:
        """Return the number of rows in the history after a round."""
        return self.known + (self.clients if self.newcomers else 0)


class Fleet:
    """Clients that take part in turn: each does so once in known // clients rounds."""

    def __init__(self, size: Size, kind: str) -> None:
        self.size, self.rng = size, np.random.default_rng(0)
        self.shared = self.rng.standard_normal(size.tensors * size.values) * COMMON[kind]
        self.window = size.known // size.clients
        self.history = History(size.layers)
        for number in range(self.window):
            for client, row in self.updates(number).items():
                self.history.put(client, number, row, loss=1.0, samples=10)
        self.history.products(list(self.history.rows()))

    def updates(self, number: int) -> dict[str, Row]:
        """Return the rows of a round, by client."""
        first = number * self.size.clients
        within = first + self.size.clients if self.size.newcomers else self.size.known
        names = [
            f"client {place % within:06d}" for place in range(first, first + self.size.clients)
        ]
        rows = self.rng.standard_normal((len(names), len(self.shared))) + self.shared
        return dict(zip(names, rows.astype(np.float32), strict=True))

    def reports(self, clients: list[str]) -> dict[str, Report]:
        """Return random reports of these clients."""
        return {client: Report(10, float(self.rng.uniform(0.2, 3.0))) for client in clients}


def aggregation(fleet: Fleet, number: int, rows: dict[str, Row]) -> Aggregation:
    """Return the aggregation of a round with its rows added."""
    work = Aggregation(
        recipe("fedlf"),
        fleet.size.layers,
        round_number=number,
        history=fleet.history,
        expected=list(rows),
    )
    work.extend(rows)
    return work


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a call takes, and its result."""
    began = time.perf_counter()
    out = work()
    return time.perf_counter() - began, out


def measured_times(size: Size, kind: str, times: int) -> dict[str, Any]:
    """Return the best times of several rounds, and their ratios to the reference."""
    fleet = Fleet(size, kind)
    taking_in, stepping, remembering, multiplying = [], [], [], []
    status = ""
    for number in range(fleet.window, fleet.window + times):
        rows = fleet.updates(number)
        reports = fleet.reports(list(rows))
        adding_seconds, work = seconds(partial(aggregation, fleet, number, rows))
        taking_in.append(adding_seconds)
        step_seconds, step = seconds(partial(work.step, reports))
        stepping.append(adding_seconds + step_seconds)
        status = step.diagnostics.status
        remembering.append(seconds(partial(work.remember, rows))[0])
        multiplying.append(seconds(partial(multiplied, fleet))[0])
        del work, step
        gc.collect()
        # The oldest rows are dropped, so that newcomers do not make the history larger.
        for client, past in fleet.history.rows().items():
            if number - past.round >= fleet.window:
                fleet.history.discard(client)
    return {
        "status": status,
        "seconds_taking_in": min(taking_in),
        "seconds_step": min(stepping),
        "seconds_remember": min(remembering),
        "seconds_numpy_products": min(multiplying),
        "ratio_step_to_numpy_products": min(stepping) / min(multiplying),
        "ratio_remember_to_numpy_products": min(remembering) / min(multiplying),
    }


def multiplied(fleet: Fleet) -> list[Any]:
    """Return the reference: all inner products of the history's rows, in float64."""
    rows = np.stack([fleet.history.row(client) for client in fleet.history.rows()]).astype(
        np.float64
    )
    return [part @ part.T for part in np.split(rows, fleet.size.tensors, axis=1)]


def measured_memory(size: Size, kind: str) -> dict[str, Any]:
    """Return the memory of the history and the peak of a round in this process.

    The process must be fresh.
    """
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fleet = Fleet(size, kind)
    gc.collect()
    number = fleet.window
    rows = fleet.updates(number)
    reports, updates = fleet.reports(list(rows)), sum(row.nbytes for row in rows.values())
    tracemalloc.reset_peak()
    work = aggregation(fleet, number, rows)
    work.step(reports)
    peak_step = tracemalloc.get_traced_memory()[1] - before - updates
    gc.collect()
    begin = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    work.remember(rows)
    peak_bytes = tracemalloc.get_traced_memory()[1] - begin
    del work
    gc.collect()
    history_bytes = tracemalloc.get_traced_memory()[0] - before - updates
    tracemalloc.stop()
    bar = 4 * size.rows_bytes + size.products_bytes
    return {
        "rows_mb": size.rows_bytes / MB,
        "products_mb": size.products_bytes / MB,
        "history_held_mb": history_bytes / MB,
        "remember_peak_mb": peak_bytes / MB,
        "step_peak_mb": peak_step / MB,
        "ratio_history_memory_to_bar": (history_bytes + peak_bytes) / bar,
        "ratio_step_peak_to_products": peak_step / size.products_bytes,
    }


def in_fresh_process(size: Size, kind: str) -> dict[str, Any]:
    """Return the figures of `measured_memory` from a process of its own."""
    given = [
        "--known",
        size.known,
        "--clients",
        size.clients,
        "--tensors",
        size.tensors,
        "--values",
        size.values,
    ]
    flags = ["--newcomers"] if size.newcomers else []
    command = [sys.executable, __file__, *map(str, given), *flags, "--kinds", kind, "--only-memory"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, Any] = json.loads(out)
    return figures


def lines(size: Size, kinds: list[str], times: int) -> Iterator[dict[str, Any]]:
    """Yield one line of figures per kind of rows."""
    for kind in kinds:
        figures = measured_times(size, kind, times) | in_fresh_process(size, kind)
        rounded = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in figures.items()
        }
        yield {**size._asdict(), "kind": kind, **rounded}


def missed(line: dict[str, Any]) -> list[str]:
    """Return the bars that this line misses."""
    return [f"{key} {line[key]} > {bar}" for key, bar in BARS.items() if line[key] > bar]


def text(line: dict[str, Any]) -> str:
    """Return a line of figures as text."""
    bad = f"  MISSED: {'; '.join(missed(line))}" if missed(line) else ""
    return (
        f"{line['kind']:12} step {line['seconds_step']:.2f} s "
        f"({line['ratio_step_to_numpy_products']:.0f} x G @ G.T, {line['status']}), "
        f"remember {line['seconds_remember']:.3f} s, history {line['history_held_mb']:.0f} MB, "
        f"step {line['step_peak_mb']:.0f} MB{bad}"
    )


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--known", type=int, default=1000, help="clients in the history")
    parser.add_argument("--clients", type=int, default=100, help="clients per round")
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--values", type=int, default=13, help="values per tensor")
    parser.add_argument(
        "--newcomers", action="store_true", help="the clients of a round are not in the history yet"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(COMMON), default=list(COMMON))
    parser.add_argument("--times", type=int, default=3, help="rounds; the best times count")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    parser.add_argument(
        "--only-memory",
        action="store_true",
        help="measure only memory, of the first kind, in this process",
    )
    given = parser.parse_args()
    size = Size(given.known, given.clients, given.tensors, given.values, given.newcomers)
    if given.only_memory:
        print(json.dumps(measured_memory(size, given.kinds[0])))
        return
    for line in lines(size, given.kinds, given.times):
        print(json.dumps(line) if given.json else text(line), flush=True)


if __name__ == "__main__":
    main()
