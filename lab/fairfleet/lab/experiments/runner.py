"""Run an experiment from its first round, or from a checkpoint, to its end.

The record is handed over even if the run fails or is interrupted. A run that resumes from a
checkpoint ends with the same bits as one that was never stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.recorder import Recorder, round_accuracies, significant
from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.experiments.signals import delay_signals
from fairfleet.lab.label_noise import LabelReport
from fairfleet.lab.simulation import checkpoints
from fairfleet.lab.simulation.federation import Engine, Federation, RoundResult
from fairfleet.lab.simulation.label_correction import correct_labels, label_report
from fairfleet.lab.simulation.simulation import Simulation

Progress = Callable[[int, int], None]  # rounds done, rounds planned
CHECKPOINT_SECONDS = 60.0


class RunLabels(NamedTuple):
    """The names that a sweep gives to a run."""

    label: str  # of the rule
    setting: str = ""


def run(
    experiment: Experiment,
    *,
    labels: RunLabels | None = None,
    data_dir: Path | None = None,
    engine: Engine = "auto",
    workers: int = 0,
    progress: Progress = lambda done, planned: None,
    keep: Callable[[Run], None] = lambda run: None,
    checkpoint: Path | None = None,
) -> Run:
    """Run the experiment to its end and return its record.

    `keep` receives the record even if the run fails or is interrupted. If the checkpoint file
    exists, the run continues from it; the file is written again at intervals.
    """
    key = experiment.key()  # Identifies the data as they are now; their files may change later.
    started = time.monotonic()
    prepared = prepare(experiment, build_federation(experiment, data_dir, engine, workers))
    simulation = Simulation(prepared.federation)
    check_evaluable(simulation)
    labels = labels or RunLabels(experiment.rule)
    state = RunProgress(experiment, key, simulation, labels, checkpoint)
    state.prepared(prepared, started)
    with delay_signals() as stop_if_signalled:
        try:
            for result in () if state.failure else simulation.rounds():
                state.add_round(result)
                progress(simulation.done, experiment.rounds)
                stop_if_signalled(before=state.save)
        except TaskFailed as error:
            state.failure = str(error)
        finally:  # Also on Ctrl-C, so that the finished rounds are kept.
            record = state.record()
            keep(record)
            state.delete_checkpoint(record)
    return record


class Prepared(NamedTuple):
    """A federation that is ready for its rounds."""

    federation: Federation
    labels: LabelReport | None  # None if labels have neither noise nor a correction
    failure: str = ""  # why its rounds cannot begin


def prepare(experiment: Experiment, federation: Federation) -> Prepared:
    """Correct the labels of a federation, if the experiment says so.

    The result follows from the experiment alone, so a resumed run prepares the same federation.
    """
    if experiment.label_correction is None:
        report = label_report(federation.clients) if experiment.label_noise else None
        return Prepared(federation, report)
    try:
        return Prepared(*correct_labels(federation, experiment.label_correction))
    except TaskFailed as error:
        failure = f"before the first round: {error}"
        return Prepared(federation, label_report(federation.clients), failure)


def check_evaluable(simulation: Simulation) -> None:
    """Raise UsageError if no honest client has test samples to evaluate the model with."""
    names = simulation.data.names
    tested = {name for name, y in zip(names, simulation.data.test.y, strict=True) if len(y)}
    if not tested:
        raise UsageError(
            "no client has test samples to evaluate the model; give a split, such as [0.8, 0.2]"
        )
    if not tested - simulation.behaviour.dishonest:
        raise UsageError(
            f"none of the {len(names)} clients is honest and has test samples to evaluate the "
            "model; `clients` of an attack is a share, for example 0.1 for a tenth of the clients"
        )


class RunProgress:
    """The state of one run: its recorder, its checkpoint and the time it took."""

    def __init__(
        self,
        experiment: Experiment,
        key: str,
        simulation: Simulation,
        labels: RunLabels,
        checkpoint: Path | None,
    ) -> None:
        self.experiment, self.key, self.simulation = experiment, key, simulation
        self.labels, self.checkpoint = labels, checkpoint
        names, attackers = simulation.data.names, simulation.behaviour.dishonest
        self.dishonest = [client for client, name in enumerate(names) if name in attackers]
        honest = np.setdiff1d(np.arange(len(names)), self.dishonest)
        self.recorder = Recorder(honest, attackers, experiment.measure)
        self.failure = ""
        self.label_report: LabelReport | None = None
        self._earlier_time = TimeUsed()
        if checkpoint:
            self._resume(checkpoint)
        self._started = self._saved = time.monotonic()

    def prepared(self, prepared: Prepared, started: float) -> None:
        """Take over what happened before the first round, which began at this time."""
        self.label_report, self.failure = prepared.labels, prepared.failure
        if self.experiment.label_correction:
            self._started = started

    def _resume(self, checkpoint: Path) -> None:
        saved = checkpoints.restore(checkpoint, self.simulation)
        if saved is None:
            return
        earlier = Run.model_validate_json(saved["run"])
        self._earlier_time = TimeUsed(earlier.seconds, earlier.training_seconds)
        self.recorder.resume(earlier, json.loads(saved["since"]))

    def add_round(self, result: RoundResult) -> None:
        """Record one round, and write the checkpoint if the last one is old."""
        self.recorder.add_round(result)
        if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the checkpoint. Call this only between two rounds."""
        if self.checkpoint:
            since = json.dumps(self.recorder.since_last_point)
            saved = {"run": self.record().model_dump_json(), "since": since}
            checkpoints.save(self.checkpoint, self.simulation, saved)
            self._saved = time.monotonic()

    def delete_checkpoint(self, record: Run) -> None:
        """Delete the checkpoint of a complete run, once its record is kept."""
        if self.checkpoint and record.complete:
            self.checkpoint.unlink(missing_ok=True)

    def record(self) -> Run:
        """Return the record of the run as it stands."""
        simulation, scores = self.simulation, self.recorder.scores
        personal = scores.personal if scores else None
        return Run(
            key=self.key,
            label=self.labels.label,
            setting=self.labels.setting,
            experiment=self.experiment,
            complete=self.recorder.rounds_done == self.experiment.rounds or bool(self.failure),
            failure=self.failure,
            rounds=self.recorder.rounds_done,
            seconds=round(self._earlier_time.seconds + time.monotonic() - self._started, 3),
            training_seconds=round(
                self._earlier_time.training_seconds + simulation.seconds.training, 3
            ),
            accuracy=round_accuracies(scores.accuracy) if scores else (),
            losses=round_accuracies(scores.loss) if scores else (),
            measured=significant(scores.own.values) if scores and scores.own else (),
            better=self.recorder.measured(scores).direction if scores else "higher",
            personal=() if personal is None else round_accuracies(personal),
            tested=tuple(len(y) for y in simulation.data.test.y),
            parameters=len(simulation.model.parameters),
            dishonest=tuple(self.dishonest),
            admission=self.recorder.admission,
            points=tuple(self.recorder.points),
            epsilon=simulation.epsilon(),
            labels=self.label_report,
            made_by=f"fairfleet {version('fairfleet')}, torch {torch.__version__}",
            unix_seconds=round(time.time()),
        )


class TimeUsed(NamedTuple):
    """The time that a run took before its checkpoint."""

    seconds: float = 0.0
    training_seconds: float = 0.0
