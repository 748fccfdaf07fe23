"""Runs of experiments, from the first round or a checkpoint to the end, with their books kept."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.fairness import Fairness
from fairfleet.lab import checkpoints
from fairfleet.lab.cohort import Served
from fairfleet.lab.experiment import Experiment, federation
from fairfleet.lab.federation import Engine, RoundTold
from fairfleet.lab.interrupts import put_off
from fairfleet.lab.records import Point, Run
from fairfleet.lab.simulation import Simulation

Progress = Callable[[int, int], None]  # rounds done, rounds planned
CHECKPOINT_SECONDS = 60.0
DIGITS = 5  # of an accuracy: clients have fewer than a hundred thousand test samples


class Names(NamedTuple):
    """What a sweep calls a run."""

    label: str
    setting: str = ""


def run(
    experiment: Experiment,
    *,
    names: Names | None = None,
    data_dir: Path | None = None,
    engine: Engine = "auto",
    workers: int = 0,
    progress: Progress = lambda done, planned: None,
    keep: Callable[[Run], None] = lambda found: None,
    checkpoint: Path | None = None,
) -> Run:
    """Runs the experiment to its end. `keep` gets the run also where it fails or is interrupted.

    With a checkpoint it goes on from there, if the file is there, and writes it from time to time.
    """
    key = experiment.key()  # of the data as they are now, whatever becomes of their files
    simulation = Simulation(federation(experiment, data_dir, engine, workers))
    check_judges(simulation)
    running = Running(experiment, key, simulation, names or Names(experiment.rule), checkpoint)
    with put_off() as end_if_asked:
        try:
            for told in simulation.rounds():
                running.take(told)
                progress(simulation.done, experiment.rounds)
                end_if_asked(before=running.save)
        except TaskFailed as error:
            running.failure = str(error)
        finally:  # also on Ctrl-C: what was done is kept
            found = running.told()
            keep(found)
            running.forget_checkpoint(found)
    return found


def check_judges(simulation: Simulation) -> None:
    """A run without anyone to judge its model would have nothing to tell."""
    names = simulation.data.names
    tested = {name for name, y in zip(names, simulation.data.test.y, strict=True) if len(y)}
    if not tested:
        raise UsageError("no client has test samples to judge the model by; give a split, such as [0.8, 0.2]")
    if not tested - simulation.conduct.dishonest:
        raise UsageError(
            f"of {len(names)} clients no honest one with test samples is left to judge the model; "
            "an attack's `clients` is a share, 0.1 for a tenth of them"
        )


class Running:
    """The books of one run."""

    def __init__(
        self, experiment: Experiment, key: str, simulation: Simulation, names: Names, checkpoint: Path | None
    ) -> None:
        self.experiment, self.key, self.simulation = experiment, key, simulation
        self.names, self.checkpoint = names, checkpoint
        everyone = simulation.data.names
        self.dishonest = [at for at, name in enumerate(everyone) if name in simulation.conduct.dishonest]
        self.recorder = Recorder(np.setdiff1d(np.arange(len(everyone)), self.dishonest), simulation.conduct.dishonest)
        self.failure = ""
        self._before = Spent()
        books = checkpoints.restore(checkpoint, simulation) if checkpoint else None
        if books is not None:
            before = Run.model_validate_json(books["run"])
            self._before = Spent(before.seconds, before.training_seconds)
            self.recorder.go_on(before, json.loads(books["since"]))
        self._began = self._saved = time.monotonic()

    def take(self, told: RoundTold) -> None:
        self.recorder.take(told)
        if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
            self.save()

    def save(self) -> None:
        """Between two rounds."""
        if self.checkpoint:
            books = {"run": self.told().model_dump_json(), "since": json.dumps(self.recorder.since)}
            checkpoints.save(self.checkpoint, self.simulation, books)
            self._saved = time.monotonic()

    def forget_checkpoint(self, kept: Run) -> None:
        """Once the run is kept elsewhere."""
        if self.checkpoint and kept.complete:
            self.checkpoint.unlink(missing_ok=True)

    def told(self) -> Run:
        simulation, served = self.simulation, self.recorder.served
        return Run(
            key=self.key,
            label=self.names.label,
            setting=self.names.setting,
            experiment=self.experiment,
            complete=self.recorder.done == self.experiment.rounds or bool(self.failure),
            failure=self.failure,
            rounds=self.recorder.done,
            seconds=round(self._before.seconds + time.monotonic() - self._began, 3),
            training_seconds=round(self._before.training + simulation.seconds.training, 3),
            accuracy=_shortened(served.accuracy) if served else (),
            losses=_shortened(served.loss) if served else (),
            personal=_shortened(served.personal) if served and served.personal is not None else (),
            tested=tuple(len(y) for y in simulation.data.test.y),
            parameters=len(simulation.model.parameters),
            dishonest=tuple(self.dishonest),
            admission=self.recorder.admission,
            points=tuple(self.recorder.points),
            epsilon=simulation.epsilon(),
            made_by=f"fairfleet {version('fairfleet')}, torch {torch.__version__}",
            unix_seconds=round(time.time()),
        )


class Spent(NamedTuple):
    """Before the checkpoint."""

    seconds: float = 0.0
    training: float = 0.0


class Recorder:
    """Turns rounds, as they come, into points."""

    def __init__(self, honest: np.ndarray, dishonest: AbstractSet[str] = frozenset()) -> None:
        self.points: list[Point] = []
        self.served: Served | None = None  # the last that was measured
        self.done = 0  # rounds
        self.admission: dict[str, tuple[int, int]] = {}
        self._honest, self._dishonest = honest, dishonest
        self.since: dict[str, list[float]] = {}  # what the rounds told since the last point

    def go_on(self, before: Run, since: dict[str, list[float]]) -> None:
        """As if the rounds of this run had been taken here."""
        self.points, self.done, self.admission = list(before.points), before.rounds, dict(before.admission)
        self.since = since
        if before.accuracy:
            kept = (before.accuracy, before.losses, before.personal)
            accuracy, loss, personal = (np.array(values, np.float64) for values in kept)
            self.served = Served(accuracy, loss, personal if len(personal) else None)

    def take(self, told: RoundTold) -> None:
        self.done += 1
        for name, value in _measured(told).items():
            if value is not None and math.isfinite(value):
                self.since.setdefault(name, []).append(value)
        for one in told.findings:
            name = f"{one.check} {one.decision}"
            honest, others = self.admission.get(name, (0, 0))
            lies = one.client in self._dishonest
            self.admission[name] = (honest + (not lies), others + lies)
        if told.served is None:
            return
        self.served = told.served
        known = told.served.accuracy[self._honest]
        fairness = Fairness.of(known[np.isfinite(known)])
        self.points.append(
            Point(
                round=told.round + 1,
                mean=_short(fairness.mean),
                deviation=_short(fairness.standard_deviation),
                worst_5=_short(fairness.worst_5),
                best_5=_short(fairness.best_5),
                worst_10=_short(fairness.worst_10),
                best_10=_short(fairness.best_10),
                improved=told.improved,
                **{name: _mean(self.since.get(name), digits) for name, digits in ROUNDED.items()},
            )
        )
        self.since = {}


def _short(value: float) -> float:
    return round(float(value), DIGITS)


def _shortened(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(_short(value) if math.isfinite(value) else None for value in values)


def _measured(told: RoundTold) -> dict[str, float | None]:
    """Those fields of a point that are means over rounds."""
    coded = told.coded._asdict() if told.coded else {}
    return {
        "loss": told.loss,
        "conflicts": _conflicts(told),
        "layer_conflicts": _layer_conflicts(told),
        "factor": told.factor,
        **coded,
    }


def _mean(values: list[float] | None, rounded: Callable[[float], float]) -> float | None:
    return rounded(float(np.mean(values))) if values else None


ROUNDED: dict[str, Callable[[float], float]] = {
    "loss": _short,
    "conflicts": _short,
    "layer_conflicts": _short,
    "factor": _short,
    "update_bytes": lambda value: round(value, 1),
    "gram_error": lambda value: float(f"{value:.4g}"),  # it may be far below the digits of an accuracy
    "flipped": _short,
}


def _conflicts(told: RoundTold) -> float | None:
    return len(told.diagnostics.conflicts) / len(told.clients) if told.diagnostics else None


def _layer_conflicts(told: RoundTold) -> float | None:
    if not told.diagnostics or not told.diagnostics.layer_conflicts:
        return None
    return float(np.mean([len(names) for names in told.diagnostics.layer_conflicts])) / len(told.clients)
