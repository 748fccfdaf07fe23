"""What a simulated training costs beside the plainest PyTorch loop that does the same work, in this minute.

    python benchmarks/simulation.py --json
    python benchmarks/simulation.py --rule fedlf --pairs 3
    python benchmarks/simulation.py --memory --json

100 clients with 600 samples each, 10 in a round, MLP 784-200-200-10, batch 50, one epoch, SGD 0.1. The plain loop is
that of the shared floor.py: one process, one client after another, the loss on the received model first; it does not
draw batches, aggregate or report. It runs with one and with two threads, and the better counts. Ours is everything
from the clients' arrays to the evaluated model. Pairs are interleaved; only the ratios mean something.

--memory: 1,000 clients and a model of a million parameters, 10 in a round, with a rule that keeps the latest update of
every client and looks at those of the last ten rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # else its threads spin on a core that the next part needs

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fairfleet.common.plan import Plan
from fairfleet.lab.clients import ClientData
from fairfleet.lab.experiment import rule_named
from fairfleet.lab.federation import Federation
from fairfleet.lab.simulation import Seconds, Simulation

CLIENTS, PER_ROUND, SAMPLES, BATCH, FEATURES, CLASSES = 100, 10, 600, 50, 784, 10
BAR = 0.6


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float


def cost(work: Callable[[], object]) -> Cost:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - began, time.process_time() - cpu)


def mlp(*hidden: int) -> nn.Module:
    widths = [FEATURES, *hidden, CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def fleet(clients: int, samples: int) -> list[ClientData]:
    random = np.random.default_rng(0)

    def some(count: int) -> tuple[Any, Any]:
        return random.standard_normal((count, FEATURES), np.float32), random.integers(0, CLASSES, count)

    return [ClientData(f"client-{k:04d}", *some(samples), *some(samples // 6)) for k in range(clients)]


def plain_loop(rounds: int, data: list[ClientData]) -> None:
    model = mlp(200, 200)
    tensors = [(torch.from_numpy(one.train_x), torch.from_numpy(one.train_y)) for one in data[:PER_ROUND]]
    for _ in range(rounds):
        for x, y in tensors:
            local = copy.deepcopy(model)
            with torch.no_grad():
                cross_entropy(local(x), y).item()
            solver = torch.optim.SGD(local.parameters(), lr=0.1)
            for at in range(0, SAMPLES, BATCH):
                solver.zero_grad()
                cross_entropy(local(x[at : at + BATCH]), y[at : at + BATCH]).backward()  # type: ignore[no-untyped-call]
                solver.step()


def best_plain(rounds: int, data: list[ClientData]) -> Cost:
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(cost(lambda: plain_loop(rounds, data)))
    torch.set_num_threads(before)
    return min(found)


def simulate(rounds: int, data: list[ClientData], rule: str, hidden: tuple[int, ...] = (200, 200)) -> Seconds:
    plan = Plan(epochs=1, batch_size=BATCH, learning_rate=0.1)
    made = Federation(
        data, lambda: mlp(*hidden), rule_named(rule), plan, rounds, clients_per_round=PER_ROUND, evaluate_every=0
    )
    simulation = Simulation(made)
    for _ in simulation.rounds():
        pass
    return simulation.seconds


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(*words: str) -> float:
    """What a process that does nothing else takes at its peak."""
    done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["peak_rss_mb"])


def alone(clients: int, samples: int, rounds: int, rule: str, hidden: tuple[int, ...]) -> dict[str, float]:
    spent = cost(lambda: simulate(rounds, fleet(clients, samples), rule, hidden))
    return {"peak_rss_mb": peak_rss_mb(), "seconds": spent.seconds, "clients": clients, "rounds": rounds}


def pairs(count: int, rounds: int, rule: str) -> dict[str, float]:
    data = fleet(CLIENTS, SAMPLES)
    simulate(2, data, rule)  # what happens once in a process is not measured, on either side
    plain_loop(2, data)
    found, where = [], Seconds()
    for _ in range(count):
        plain = best_plain(rounds, data)
        ours = cost(lambda: where.__dict__.update(simulate(rounds, data, rule).__dict__))
        found.append((plain, ours))
    middle = statistics.median
    return {
        "ratio_to_plain_loop": middle(ours.seconds / plain.seconds for plain, ours in found),
        "ratio_cpu_to_plain_loop": middle(ours.cpu_seconds / plain.cpu_seconds for plain, ours in found),
        "bar": BAR,
        "plain_loop_seconds": middle(plain.seconds for plain, _ in found),
        "our_seconds": middle(ours.seconds for _, ours in found),
        "training_seconds": where.training,
        "aggregation_seconds": where.aggregation,
        "evaluation_seconds": where.evaluation,
        "rounds": rounds,
        "pairs": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rule", default="fedavg")
    parser.add_argument("--memory", action="store_true", help="1,000 clients, a million parameters, all in the history")
    parser.add_argument("--alone", action="store_true", help="only the simulation, once, with its peak of memory")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.memory:
        found = alone(1000, 60, 250, "fedfv,tau=10", (920, 300))
    elif given.alone:
        found = alone(CLIENTS, SAMPLES, given.rounds, given.rule, (200, 200))
    else:
        found = pairs(given.pairs, given.rounds, given.rule)
        found["peak_rss_mb"] = in_own_process("--alone", "--json", "--rounds", str(given.rounds), "--rule", given.rule)
    told = {key: round(value, 4) for key, value in found.items()}
    print(json.dumps(told) if given.json else "\n".join(f"{key:24} {value:>10}" for key, value in told.items()))


if __name__ == "__main__":
    main()
