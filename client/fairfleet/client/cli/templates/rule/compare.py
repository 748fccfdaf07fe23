"""Compare the rule with plain averaging in one process, without a server and without installing it.

Ten clients share scikit-learn's digits. The images of two of them are rotated: plain averaging
serves these two badly.
"""

from __future__ import annotations

import argparse

import numpy as np

from fairfleet.client.task import Job
from fairfleet.common.fairness import Fairness
from fairfleet.common.training_plan import Plan
from fairfleet.lab import digits
from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.rules import Recipe, Report, recipe
from project_name import LossWeighted


def train(chosen: Recipe, rounds: int) -> dict[str, float]:
    """Train with all ten clients in each round; return the accuracy of each at the end."""
    tasks = {name: digits.softmax(name) for name in digits.CLIENTS}
    model = tasks["upright-0"].initial_model()
    plan, state = Plan(steps=10, learning_rate=0.1), None
    for round_number in range(rounds):
        rows, reports = {}, {}
        for name, task in tasks.items():
            trained = task.train(model.named(), Job(plan.for_client(name, round_number)))
            parameters = [trained.arrays[spec.name].ravel() for spec in model.signature.tensors]
            rows[name] = model.parameters - np.concatenate(parameters)
            report = trained.report
            reports[name] = Report(samples=report.samples, loss=report.loss_before)
        outcome = aggregate(
            model.parameters, rows, reports, chosen, state=state, round_number=round_number
        )
        model.parameters[:], state = outcome.model, outcome.state
    return {name: task.evaluate(model.named()).accuracy or 0.0 for name, task in tasks.items()}


def main() -> None:
    """Print the accuracies of both rules."""
    parser = argparse.ArgumentParser(description="Compare the rule with plain averaging.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--power", type=float, default=1.0, help="parameter of the rule")
    arguments = parser.parse_args()
    own = Recipe("project_name", LossWeighted(power=arguments.power))
    print(f"{'':14}{'mean':>8}{'worst':>8}{'std':>8}")
    for chosen in (recipe("fedavg"), own):
        accuracies = list(train(chosen, arguments.rounds).values())
        measures = Fairness.of(accuracies)
        print(
            f"{chosen.name:14}{measures.mean:8.1%}{min(accuracies):8.1%}{np.std(accuracies):8.3f}"
        )


if __name__ == "__main__":
    main()
