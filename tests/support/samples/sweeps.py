"""Small experiments, and runs of them that were never trained."""

from __future__ import annotations

from typing import Any

from fairfleet.lab.experiments import run_log
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Run

SMALL: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "plan": {"steps": 2}}


def made(label: str, seed: int, accuracy: list[float], setting: str = "") -> Run:
    points = [
        run_log.Point(
            round=k,
            mean=0.1 * k,
            deviation=0.1,
            worst_5=0.05 * k,
            best_5=0.9,
            loss=1.0,
            improved=0.5,
            conflicts=0.2,
            layer_conflicts=None,
        )
        for k in (1, 2)
    ]
    experiment = Experiment(seed=seed, rounds=2)
    return Run(
        key=f"{label}{seed}",
        label=label,
        setting=setting,
        experiment=experiment,
        complete=True,
        rounds=2,
        seconds=1.0,
        training_seconds=0.5,
        accuracy=tuple(accuracy),
        losses=(1.0,),
        points=tuple(points),
    )


def keys_of(run: Run) -> set[str]:
    """Return the keys that a run's experiment has, or had before a revision."""
    return {run.experiment.key(), *run.experiment.earlier_keys().values()}
