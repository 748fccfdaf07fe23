"""Measure what each rule costs, compared with the plain weighted sum.

    python benchmarks/aggregation.py --clients 10 --params 10000000 --json
    python benchmarks/aggregation.py --clients 100 --params 1000000 --json
    python benchmarks/aggregation.py --finite --json

`whole` covers everything from the rows to the direction: inner products, rule, combination and
diagnostics. `after the last row` is the remaining work when the last update arrives, if the others
were multiplied before. The baselines are those of the shared floor.py: numpy's c @ J in float32,
one read of all rows, and FedFV vector by vector. Only the ratios are comparable. Each pair is
measured side by side, and the best of several times counts.

`--finite` measures the cost of checking that no non-finite value is committed, with FedAvg and each
of two server optimizers. Three parts of a round check their results: the combination, the optimizer
and the next model. Each part runs alternately with its checks and without. `ratio_finite_check` is
the sum of the differences of the best times, divided by the time of a round from the rows to the
next model. The check of the combination also detects where float32 lost digits; that is included.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# After a call, threads of BLAS spin for some 30 ms on a core that the next measurement needs. Real
# rounds are further apart. Here they sleep at once; the variable counts before numpy is loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np

from fairfleet.common.tensors import Model
from fairfleet.server.aggregation import finite
from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.aggregation.results import ServerState
from fairfleet.server.gram import numpy_kernel
from fairfleet.server.gram.blocks import Row
from fairfleet.server.gram.matmul_kernel import kernel_for
from fairfleet.server.rules import Recipe, Report, listings, optimizer, optimizer_vectors, recipe

# Each of these is another rule with a training plan or a server optimizer of its own.
SAME_AS = {"fedprox", "ditto", "mgda_prox", "fedadam", "fedyogi", "fedadagrad", "fedamsgrad"}
BARS_WHOLE = {10: 12.0}
BARS_LAST = {10: 4.0, 100: 7.0}
BARS_NAIVE = {10: 5.0, 100: 12.0}
BAR_FINITE = 0.02


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def naive_fedfv(rows: Row) -> Row:
    """Compute FedFV as the paper writes it, with m squared passes over vectors, like floor.py."""
    total = np.zeros(rows.shape[1], dtype=np.float32)
    for k in range(len(rows)):
        mine = rows[k].copy()
        for j in range(len(rows)):
            if j != k and (dot := mine @ rows[j]) < 0:
                mine -= (dot / (rows[j] @ rows[j])) * rows[j]
        total += mine
    return total / len(rows)


class Bench:
    """Rows and reports of one round, on which each rule is measured."""

    def __init__(self, clients: int, params: int, layers: int) -> None:
        rng = np.random.default_rng(0)
        self.matrix = rng.standard_normal((clients, params), dtype=np.float32)
        self.weights = np.full(clients, 1 / clients, dtype=np.float32)
        self.rows = {f"client {k:06d}": self.matrix[k] for k in range(clients)}
        self.reports = {client: report(rng) for client in self.rows}
        cut = params // layers
        self.layers = [cut] * (layers - 1) + [params - cut * (layers - 1)]
        *self.early, self.last = self.rows

    def weighted_sum(self) -> object:
        """Compute the baseline."""
        return self.weights @ self.matrix

    def full_aggregation(self, rule: Recipe) -> Aggregation:
        """Aggregate from the rows to the direction, with the same kernel as `aggregate`."""
        work = Aggregation(rule, self.layers, kernel=kernel_for(len(self.rows)))
        work.extend(self.rows)
        work.direction(self.reports)
        return work

    def waiting_for_last(self, rule: Recipe, full: Aggregation) -> Aggregation:
        """Return an aggregation in which all rows except the last one are multiplied."""
        work = Aggregation(rule, self.layers)
        products = full.engine.gram([("now", client) for client in self.early]).layers
        work.engine.adopt({("now", client): self.rows[client] for client in self.early}, products)
        work._clients += self.early
        return work

    def finish_last(self, work: Aggregation) -> None:
        """Add the last row and compute the direction."""
        work.add(self.last, self.rows[self.last])
        work.direction(self.reports)

    def measure(self, name: str, times: int) -> dict[str, Any]:
        """Return the best times of a rule, ratios to the weighted sum, and the peak memory."""
        rule = recipe(name)
        sums: list[float] = []
        wholes: list[float] = []
        lasts: list[float] = []
        reset_peak()
        for _ in range(times):
            began = time.perf_counter()
            full = self.full_aggregation(rule)
            wholes.append(time.perf_counter() - began)
            for _ in range(3):
                waiting = self.waiting_for_last(rule, full)
                lasts.append(seconds(partial(self.finish_last, waiting)))
                del waiting
            peak = peak_rss_mb()
            del full  # so that the next repetition does not add to it
            sums += [seconds(self.weighted_sum) for _ in range(3)]
        return {
            "seconds_whole": min(wholes),
            "seconds_after_last_row": min(lasts),
            "seconds_weighted_sum": min(sums),
            "ratio_whole_to_weighted_sum": min(wholes) / min(sums),
            "ratio_after_last_row_to_weighted_sum": min(lasts) / min(sums),
            "peak_rss_mb": peak,
        }


class CheckedRounds:
    """Rounds from the rows to the next model, with and without checks for finite values."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.rule = bench, recipe("fedavg", optimizer(name))
        size = sum(bench.layers)
        self.model, self.spare = (
            Model.of({"all": np.zeros(size, np.float32)}, {}) for _ in range(2)
        )
        self.state = ServerState()

    def round(self) -> None:
        """Run one round and keep its model and state for the next one."""
        work = Aggregation(self.rule, self.bench.layers)
        work.extend(self.bench.rows)
        step = work.step(self.bench.reports, self.state, out=self.spare.parameters)
        finite.take_step(self.model, step.vector, self.spare)
        self.state, self.model, self.spare = step.state, self.spare, self.model

    def parts(self) -> dict[str, Callable[[], object]]:
        """Return the parts with checks, by name; each is a call without arguments."""
        work = Aggregation(self.rule, self.bench.layers)
        work.extend(self.bench.rows)
        order = [("now", client) for client in self.bench.rows]
        weights = self.bench.weights.astype(np.float64)
        direction, optimizer = np.empty_like(self.model.parameters), self.rule.optimizer
        state = self.state.optimizer or optimizer.initial(direction.size)
        return {
            "combine": lambda: work.engine.combine_checked(order, weights, direction),
            "optimizer": lambda: optimizer.step(direction, state),
            "subtract": lambda: finite.take_step(self.model, direction, self.spare),
        }

    def measure(self, times: int) -> dict[str, Any]:
        """Return the best time of a round, and what the checks of each part add to it."""
        self.round()  # The first round allocates memory.
        round_seconds = min(seconds(self.round) for _ in range(times))
        checks = {name: self._difference(part, 3 * times) for name, part in self.parts().items()}
        return {
            "seconds_round": round_seconds,
            **{f"seconds_check_{name}": value for name, value in checks.items()},
            "ratio_finite_check": sum(checks.values()) / round_seconds,
        }

    def _difference(self, part: Callable[[], object], times: int) -> float:
        """Return the best time with checks minus the best time without, in seconds."""
        with_them, without = [], []
        for _ in range(times):
            with_them.append(seconds(part))
            with unchecked():
                without.append(seconds(part))
        return max(0.0, min(with_them) - min(without))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Replace the checks: every block counts as finite, and no digits count as lost."""
    replacements = {(optimizer_vectors, "all_finite"): True, (finite, "all_finite"): True}
    lengths = {
        (numpy_kernel, "squared_length"): 1e300,
        (numpy_kernel, "_squared_length_by_blas"): 1e300,
    }
    with contextlib.ExitStack() as stack:
        for (module, name), answer in {**replacements, **lengths}.items():
            stack.enter_context(
                mock.patch.object(module, name, lambda block, answer=answer: answer)
            )
        yield


def finite_lines(clients: int, params: int, layers: int, times: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of the checks, one line per server optimizer."""
    bench = Bench(clients, params, layers)
    for name in ("sgd", "adam"):
        figures = {
            key: round(value, 5) for key, value in CheckedRounds(bench, name).measure(times).items()
        }
        size = {"clients": clients, "params": params, "rule": "fedavg", "optimizer": name}
        yield {**size, **figures, "bar_ratio_finite_check": BAR_FINITE}


def report(rng: np.random.Generator) -> Report:
    """Return a plausible random report."""
    return Report(
        samples=int(rng.integers(50, 500)),
        loss=float(rng.uniform(0.2, 3.0)),
        first_loss=float(rng.uniform(2.0, 3.0)),
        accuracy=float(rng.uniform(0.2, 0.9)),
        participations=int(rng.integers(1, 10)),
        steps=int(rng.integers(5, 30)),
        gradient_norm=float(rng.uniform(1.0, 20.0)),
        local_lr=0.01,
    )


def reset_peak() -> None:
    """Reset the peak resident size that Linux records for this process."""
    gc.collect()
    # Without the reset, the peak of the whole run is reported, which can only be larger.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mb() -> float:
    """Return the peak resident size of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def lines(
    clients: int, params: int, layers: int, times: int, only: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield one line of figures per rule."""
    bench = Bench(clients, params, layers)
    for name in only or [name for name in listings() if name not in SAME_AS]:
        figures = bench.measure(name, times)
        if name == "fedfv":
            naive = seconds(lambda: naive_fedfv(bench.matrix))
            figures["ratio_naive_to_whole"] = naive / figures["seconds_whole"]
        read = min(seconds(bench.matrix.max) for _ in range(3))
        figures["ratio_whole_to_one_read"] = figures["seconds_whole"] / read
        rounded = {key: round(value, 4) for key, value in figures.items()}
        yield {
            "clients": clients,
            "params": params,
            "rule": name,
            **rounded,
            "rows_mb": bench.matrix.nbytes / 1e6,
        }


def missed(line: dict[str, Any]) -> list[str]:
    """Return the bars that this line misses.

    Column rules read columns instead of inner products, so only their memory is compared.
    """
    m = line["clients"]
    bars = {
        "ratio_whole_to_weighted_sum": BARS_WHOLE,
        "ratio_after_last_row_to_weighted_sum": BARS_LAST,
    }
    linear = not recipe(line["rule"]).rule.needs().columns
    out = [
        f"{key} {line[key]} > {bar[m]}"
        for key, bar in bars.items()
        if linear and line[key] > bar.get(m, np.inf)
    ]
    if "ratio_naive_to_whole" in line and line["ratio_naive_to_whole"] < BARS_NAIVE.get(m, 0.0):
        out.append(f"ratio_naive_to_whole {line['ratio_naive_to_whole']} < {BARS_NAIVE[m]}")
    if line["peak_rss_mb"] > 1.25 * line["rows_mb"]:
        out.append(f"peak_rss_mb {line['peak_rss_mb']} > {1.25 * line['rows_mb']}")
    return out


def text(line: dict[str, Any]) -> str:
    """Return a line of figures as text."""
    full, last = line["ratio_whole_to_weighted_sum"], line["ratio_after_last_row_to_weighted_sum"]
    naive = (
        f", naive takes {line['ratio_naive_to_whole']:.1f} x as long"
        if "ratio_naive_to_whole" in line
        else ""
    )
    bad = f"  MISSED: {'; '.join(missed(line))}" if missed(line) else ""
    return (
        f"{line['rule']:14} whole {full:6.2f} x weighted sum, "
        f"after the last row {last:5.2f} x{naive}{bad}"
    )


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument(
        "--layers", type=int, default=8, help="number of equal layers of parameters"
    )
    parser.add_argument("--times", type=int, default=7, help="repetitions; the best time counts")
    parser.add_argument("--rules", nargs="*", default=[], help="rules to measure (default: all)")
    parser.add_argument("--finite", action="store_true", help="measure the cost of finite checks")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    given = parser.parse_args()
    if given.finite:
        for line in finite_lines(given.clients, given.params, given.layers, given.times):
            print(json.dumps(line), flush=True)
        return
    for line in lines(given.clients, given.params, given.layers, given.times, given.rules):
        print(json.dumps(line) if given.json else text(line), flush=True)


if __name__ == "__main__":
    main()
