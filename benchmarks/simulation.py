"""Measure a simulated training, compared with a plain PyTorch loop that does the same work.

    python benchmarks/simulation.py --json
    python benchmarks/simulation.py --rule fedlf --pairs 3
    python benchmarks/simulation.py --memory --json

There are 100 clients with 600 samples each and 10 of them in a round. The model is an MLP
784-200-200-10, trained for one epoch with batches of 50 and SGD 0.1. The plain loop is that of the
shared floor.py: one process trains one client after another, with the loss of the received model
first. It does not draw batches, aggregate or report. It runs with one and with two threads; the
better time counts. Ours is everything from the clients' arrays to the evaluated model. Both are
measured alternately; only the ratios are comparable.

With --memory there are 1,000 clients, a model of a million parameters and 10 clients in a round.
The rule stores the latest update of every client and uses those of the last ten rounds.
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

# Otherwise the threads of OpenBLAS spin on a core that the next measurement needs.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.experiments.rule_spec import parse_rule
from fairfleet.lab.simulation.federation import Federation
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.lab.simulation.timing import Seconds

CLIENTS, PER_ROUND, SAMPLES, BATCH, FEATURES, CLASSES = 100, 10, 600, 50, 784, 10
BAR = 0.6


class Cost(NamedTuple):
    """What a call cost; compared by time first."""

    seconds: float
    cpu_seconds: float


def cost(work: Callable[[], object]) -> Cost:
    """Return what a call costs."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - began, time.process_time() - cpu)


def mlp(*hidden: int) -> nn.Module:
    """Return a network with hidden layers of these widths."""
    widths = [FEATURES, *hidden, CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def fleet(clients: int, samples: int) -> list[ClientData]:
    """Return random data for this many clients."""
    random = np.random.default_rng(0)

    def draw(count: int) -> tuple[Any, Any]:
        inputs = random.standard_normal((count, FEATURES), np.float32)
        return inputs, random.integers(0, CLASSES, count)

    return [
        ClientData(f"client-{k:04d}", *draw(samples), *draw(samples // 6)) for k in range(clients)
    ]


def plain_loop(rounds: int, data: list[ClientData]) -> None:
    """Train the clients of each round one after another, without aggregation."""
    model = mlp(200, 200)
    tensors = [
        (torch.from_numpy(client.train_x), torch.from_numpy(client.train_y))
        for client in data[:PER_ROUND]
    ]
    for _ in range(rounds):
        for x, y in tensors:
            local = copy.deepcopy(model)
            with torch.no_grad():
                cross_entropy(local(x), y).item()
            solver = torch.optim.SGD(local.parameters(), lr=0.1)
            for start in range(0, SAMPLES, BATCH):
                batch = slice(start, start + BATCH)
                solver.zero_grad()
                cross_entropy(local(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                solver.step()


def best_plain(rounds: int, data: list[ClientData]) -> Cost:
    """Return the cost of the plain loop with one or two threads, whichever is faster."""
    threads_before, costs = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        costs.append(cost(lambda: plain_loop(rounds, data)))
    torch.set_num_threads(threads_before)
    return min(costs)


def simulate(
    rounds: int, data: list[ClientData], rule: str, hidden: tuple[int, ...] = (200, 200)
) -> Seconds:
    """Run a simulation; return where its time was spent."""
    plan = Plan(epochs=1, batch_size=BATCH, learning_rate=0.1)
    federation = Federation(
        data,
        lambda: mlp(*hidden),
        parse_rule(rule),
        plan,
        rounds,
        clients_per_round=PER_ROUND,
        evaluate_every=0,
    )
    simulation = Simulation(federation)
    for _ in simulation.rounds():
        pass
    return simulation.seconds


def peak_rss_mb() -> float:
    """Return the peak resident size of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(*words: str) -> float:
    """Return the peak memory of this program with these arguments, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *words], check=True, capture_output=True, text=True
    )
    return float(json.loads(done.stdout)["peak_rss_mb"])


def alone(
    clients: int, samples: int, rounds: int, rule: str, hidden: tuple[int, ...]
) -> dict[str, float]:
    """Return the time and the peak memory of one simulation in this process."""
    spent = cost(lambda: simulate(rounds, fleet(clients, samples), rule, hidden))
    return {
        "peak_rss_mb": peak_rss_mb(),
        "seconds": spent.seconds,
        "clients": clients,
        "rounds": rounds,
    }


def pairs(count: int, rounds: int, rule: str) -> dict[str, float]:
    """Return the medians of this many measurements of both sides."""
    data = fleet(CLIENTS, SAMPLES)
    # Costs that occur once per process are not measured, on either side.
    simulate(2, data, rule)
    plain_loop(2, data)
    pairs_of_costs, phases = [], Seconds()
    for _ in range(count):
        plain = best_plain(rounds, data)
        ours = cost(lambda: phases.__dict__.update(simulate(rounds, data, rule).__dict__))
        pairs_of_costs.append((plain, ours))
    middle = statistics.median
    return {
        "ratio_to_plain_loop": middle(
            ours.seconds / plain.seconds for plain, ours in pairs_of_costs
        ),
        "ratio_cpu_to_plain_loop": middle(
            ours.cpu_seconds / plain.cpu_seconds for plain, ours in pairs_of_costs
        ),
        "bar": BAR,
        "plain_loop_seconds": middle(plain.seconds for plain, _ in pairs_of_costs),
        "our_seconds": middle(ours.seconds for _, ours in pairs_of_costs),
        "training_seconds": phases.training,
        "aggregation_seconds": phases.aggregation,
        "evaluation_seconds": phases.evaluation,
        "rounds": rounds,
        "pairs": count,
    }


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rule", default="fedavg")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="measure memory: 1,000 clients, a million parameters, all in the history",
    )
    parser.add_argument(
        "--alone", action="store_true", help="run only the simulation, once, with its peak memory"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.memory:
        figures = alone(1000, 60, 250, "fedfv,tau=10", (920, 300))
    elif given.alone:
        figures = alone(CLIENTS, SAMPLES, given.rounds, given.rule, (200, 200))
    else:
        figures = pairs(given.pairs, given.rounds, given.rule)
        figures["peak_rss_mb"] = in_own_process(
            "--alone", "--json", "--rounds", str(given.rounds), "--rule", given.rule
        )
    rounded = {key: round(value, 4) for key, value in figures.items()}
    print(
        json.dumps(rounded)
        if given.json
        else "\n".join(f"{key:24} {value:>10}" for key, value in rounded.items())
    )


if __name__ == "__main__":
    main()
