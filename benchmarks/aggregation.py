"""What each rule costs beside the plain weighted sum, on this machine, in this minute.

    python benchmarks/aggregation.py --clients 10 --params 10000000 --json
    python benchmarks/aggregation.py --clients 100 --params 1000000 --json

`whole` is everything from the rows to the direction: inner products, rule, combination, diagnostics. `after the last
row` is what is left when the last update arrives and the others were multiplied while it was under way. The
baselines are those of the shared floor.py: numpy's c @ J in float32, one read of all rows, and FedFV vector by
vector. Only the ratios mean something; each pair is measured side by side, best of several.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The threads of BLAS spin for some 30 ms after a call, on a core that the next measurement needs. Real rounds are
# further apart than that; here they go to sleep at once. Must be said before numpy is loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np

from fairfleet.server.aggregation import Aggregation
from fairfleet.server.blocks import Row
from fairfleet.server.gram_many import kernel_for
from fairfleet.server.rules import Recipe, Report, listings, recipe

SAME_AS = {"fedprox", "ditto", "mgda_prox", "fedadam", "fedyogi", "fedadagrad"}  # another rule with a plan or optimizer
BARS_WHOLE = {10: 12.0}
BARS_LAST = {10: 4.0, 100: 7.0}
BARS_NAIVE = {10: 5.0, 100: 12.0}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def naive_fedfv(rows: Row) -> Row:
    """FedFV as the paper writes it: m squared passes over vectors. The same as floor.py's."""
    total = np.zeros(rows.shape[1], dtype=np.float32)
    for k in range(len(rows)):
        mine = rows[k].copy()
        for j in range(len(rows)):
            if j != k and (dot := mine @ rows[j]) < 0:
                mine -= (dot / (rows[j] @ rows[j])) * rows[j]
        total += mine
    return total / len(rows)


class Bench:
    """The rows, the reports, and one rule after another on them."""

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
        return self.weights @ self.matrix

    def whole(self, made: Recipe) -> Aggregation:
        work = Aggregation(made, self.layers, kernel=kernel_for(len(self.rows)))  # as `aggregate` does
        work.extend(self.rows)
        work.direction(self.reports)
        return work

    def waiting_for_last(self, made: Recipe, whole: Aggregation) -> Aggregation:
        """All rows but the last, as if they had been multiplied while it was under way."""
        work = Aggregation(made, self.layers)
        known = whole.engine.gram([("now", client) for client in self.early]).layers
        work.engine.adopt({("now", client): self.rows[client] for client in self.early}, known)
        work._clients += self.early
        return work

    def finish_last(self, work: Aggregation) -> None:
        work.add(self.last, self.rows[self.last])
        work.direction(self.reports)

    def measure(self, name: str, times: int) -> dict[str, Any]:
        made, sums, wholes, lasts = recipe(name), [], [], []
        reset_peak()
        for _ in range(times):
            keep: list[Aggregation] = []
            wholes.append(seconds(lambda keep=keep: keep.append(self.whole(made))))  # type: ignore[misc]
            for _ in range(3):
                waiting = self.waiting_for_last(made, keep[0])
                lasts.append(seconds(lambda waiting=waiting: self.finish_last(waiting)))  # type: ignore[misc]
                del waiting
            peak = peak_rss_mb()
            sums += [seconds(self.weighted_sum) for _ in range(3)]
        return {
            "seconds_whole": min(wholes),
            "seconds_after_last_row": min(lasts),
            "seconds_weighted_sum": min(sums),
            "ratio_whole_to_weighted_sum": min(wholes) / min(sums),
            "ratio_after_last_row_to_weighted_sum": min(lasts) / min(sums),
            "peak_rss_mb": peak,
        }


def report(rng: np.random.Generator) -> Report:
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
    """Makes Linux forget the largest resident size so far."""
    gc.collect()
    with contextlib.suppress(OSError):  # then the peak of the whole run is reported, which can only be larger
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def lines(clients: int, params: int, layers: int, times: int, only: list[str]) -> Iterator[dict[str, Any]]:
    bench = Bench(clients, params, layers)
    for name in only or [name for name in listings() if name not in SAME_AS]:
        found = bench.measure(name, times)
        if name == "fedfv":
            naive = seconds(lambda: naive_fedfv(bench.matrix))
            found["ratio_naive_to_whole"] = naive / found["seconds_whole"]
        read = min(seconds(bench.matrix.max) for _ in range(3))
        found["ratio_whole_to_one_read"] = found["seconds_whole"] / read
        rounded = {key: round(value, 4) for key, value in found.items()}
        yield {"clients": clients, "params": params, "rule": name, **rounded, "rows_mb": bench.matrix.nbytes / 1e6}


def missed(line: dict[str, Any]) -> list[str]:
    """The bars that this line does not reach. Column rules read columns, not inner products: only memory counts."""
    m = line["clients"]
    bars = {"ratio_whole_to_weighted_sum": BARS_WHOLE, "ratio_after_last_row_to_weighted_sum": BARS_LAST}
    linear = not recipe(line["rule"]).rule.needs().columns
    out = [f"{key} {line[key]} > {bar[m]}" for key, bar in bars.items() if linear and line[key] > bar.get(m, np.inf)]
    if "ratio_naive_to_whole" in line and line["ratio_naive_to_whole"] < BARS_NAIVE.get(m, 0.0):
        out.append(f"ratio_naive_to_whole {line['ratio_naive_to_whole']} < {BARS_NAIVE[m]}")
    if line["peak_rss_mb"] > 1.25 * line["rows_mb"]:
        out.append(f"peak_rss_mb {line['peak_rss_mb']} > {1.25 * line['rows_mb']}")
    return out


def text(line: dict[str, Any]) -> str:
    whole, last = line["ratio_whole_to_weighted_sum"], line["ratio_after_last_row_to_weighted_sum"]
    naive = f", naive takes {line['ratio_naive_to_whole']:.1f} x as long" if "ratio_naive_to_whole" in line else ""
    bad = f"  MISSED: {'; '.join(missed(line))}" if missed(line) else ""
    return f"{line['rule']:14} whole {whole:6.2f} x weighted sum, after the last row {last:5.2f} x{naive}{bad}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--layers", type=int, default=8, help="equal layers that the parameters are cut into")
    parser.add_argument("--times", type=int, default=7, help="best of so many")
    parser.add_argument("--rules", nargs="*", default=[], help="only these")
    parser.add_argument("--json", action="store_true", help="one object per line and nothing else")
    given = parser.parse_args()
    for line in lines(given.clients, given.params, given.layers, given.times, given.rules):
        print(json.dumps(line) if given.json else text(line), flush=True)


if __name__ == "__main__":
    main()
