"""The record of a run, and the log file that keeps one JSON line per run.

The log lets a sweep continue where it stopped. An interrupted run is recorded as well, marked as
incomplete; it is run again from the start, or resumed from its checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from fairfleet.common.errors import UsageError
from fairfleet.common.fairness import Fairness
from fairfleet.common.reports import Better
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.label_noise import LabelReport


class Point(BaseModel):
    """One evaluated round of the learning curve.

    The first figures are of the experiment's measure, over honest clients. Values of rounds, such
    as the training loss, are means over the rounds since the previous point. Fields with a default
    are missing in older records.
    """

    model_config = ConfigDict(frozen=True)

    round: int  # number of rounds done so far
    mean: float
    deviation: float
    worst_5: float
    best_5: float
    loss: float | None  # mean training loss of the rounds' clients, on the models they received
    # ρ: share of the last round's clients whose loss did not rise. Records before 0.2.0 have no
    # `strictly_improved`; there it is the share of the clients whose loss fell.
    improved: float | None
    conflicts: float | None  # share of the rounds' clients that the direction would harm
    layer_conflicts: float | None
    worst_10: float | None = None
    best_10: float | None = None
    factor: float | None = None  # step length, where steps were verified or searched for
    # The next three are measured for a lossy codec only; see `compression.CompressionLoss`.
    update_bytes: float | None = None  # size of an update as sent
    gram_error: float | None = None
    flipped: float | None = None
    strictly_improved: float | None = None  # share of the last round's clients whose loss fell

    @property
    def fallen(self) -> float | None:
        """Return the share of the last round's clients whose loss fell."""
        return self.improved if self.strictly_improved is None else self.strictly_improved


class Run(BaseModel):
    """The record of one run: one line of the log."""

    # Epsilon is infinite without noise, which JSON can only hold as a string.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    key: str
    label: str  # name of the rule in the sweep
    setting: str = ""
    experiment: Experiment
    complete: bool
    failure: str = ""
    rounds: int  # rounds done
    seconds: float
    training_seconds: float
    accuracy: tuple[float | None, ...] = ()  # final, one per client in the order of their names
    losses: tuple[float | None, ...] = ()
    measured: tuple[float | None, ...] = ()  # by the experiment's own measure, if it has one
    better: Better = "higher"  # values of the experiment's measure
    personal: tuple[float | None, ...] = ()  # accuracies of Ditto's personal models
    tested: tuple[int, ...] = ()  # number of test samples of each client
    parameters: int = 0  # of the model; 0 in records that are older than this field
    dishonest: tuple[int, ...] = ()  # indices of attackers among the clients
    # Decision (`loss winsorised`) to its counts for honest clients and for attackers.
    admission: dict[str, tuple[int, int]] = {}
    points: tuple[Point, ...] = ()
    epsilon: float | None = None  # differential privacy, where noise was added
    labels: LabelReport | None = None  # where labels had noise or were corrected
    made_by: str = ""
    unix_seconds: float = 0.0

    @field_validator("experiment", mode="before")
    @classmethod
    def _recorded_feedback(cls, experiment: Any) -> Any:
        """Add error feedback to a record that leaves it out, which means that it was on."""
        if isinstance(experiment, Mapping):
            return {"error_feedback": True, **experiment}
        return experiment

    @property
    def measure(self) -> str:
        """Return the measure by which the run is judged."""
        return self.experiment.measure

    @property
    def scale(self) -> float:
        """Return by how much figures are multiplied to be shown: accuracies are in percent."""
        return 100.0 if self.measure == "accuracy" else 1.0

    @property
    def sign(self) -> int:
        """Return 1 if higher values of the measure are better, -1 if lower ones are."""
        return 1 if self.better == "higher" else -1

    @property
    def honest(self) -> list[float]:
        """Return the values that count: of honest clients with test samples."""
        by_measure = {"accuracy": self.accuracy, "loss": self.losses}
        return self._of_honest(by_measure.get(self.measure, self.measured))

    @property
    def honest_personal(self) -> list[float]:
        """Return the accuracies that count of the personal models; empty without such models."""
        return self._of_honest(self.personal)

    def _of_honest(self, values: tuple[float | None, ...]) -> list[float]:
        attackers = set(self.dishonest)
        return [
            value
            for client, value in enumerate(values)
            if value is not None and client not in attackers
        ]

    @property
    def fairness(self) -> Fairness:
        """Return the fairness measures of the final values of honest clients."""
        return Fairness.of(self.honest, higher_is_better=self.sign > 0)

    @property
    def improved(self) -> float:
        """Return ρ, the mean share of clients whose loss did not rise, over the evaluated rounds.

        In records before 0.2.0 it is `strictly_improved`.
        """
        return self.over_points("improved")

    @property
    def strictly_improved(self) -> float:
        """Return the mean share of clients whose loss fell, over the evaluated rounds."""
        return self.over_points("fallen")

    def over_points(self, field: str) -> float:
        """Return the mean of a figure over the points; NaN if no point has it."""
        values = [value for point in self.points if (value := getattr(point, field)) is not None]
        return float(np.mean(values)) if values else math.nan


class Ledger:
    """A log file of runs.

    Lines are only ever appended. If several lines have the same key, the last complete one counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoint(self, experiment: Experiment) -> Path | None:
        """Return the path for the checkpoint of an unfinished run; None to keep none."""
        return self.path.with_suffix(".partial") / f"{experiment.key()}.npz"

    def prepare(self) -> None:
        """Create the file, so that a bad path fails before hours of work.

        Raise UsageError if the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise UsageError(
                f"cannot record runs in {self.path}: {error.strerror}; choose another path"
            ) from None

    def add(self, run: Run) -> None:
        """Append a run to the file."""
        self.prepare()
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # A crash cut the last line short.
                    file.write(b"\n")
            file.write(run.model_dump_json(exclude_defaults=True).encode() + b"\n")

    def runs(self) -> dict[str, Run]:
        """Return the runs by key; an incomplete run only if no complete one has its key.

        Raise UsageError if the file contains anything else than runs of this version.
        """
        runs: dict[str, Run] = {}
        for run in self._lines():
            if run.complete or not (run.key in runs and runs[run.key].complete):
                runs[run.key] = run
        return runs

    def _lines(self) -> Iterable[Run]:
        if not self.path.is_file():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            try:
                yield Run.model_validate_json(line)
            except ValidationError as error:
                if _is_cut_short(line):  # The process was killed while it wrote this line.
                    continue
                raise UsageError(
                    f"{self.path}, line {number}, is not a run of this version "
                    f"({error.error_count()} mistakes, first: {error.errors()[0]['msg']}); "
                    "move the file away to start a new one"
                ) from None


class MemoryLedger(Ledger):
    """A log in memory, for runs that are not kept."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._runs: dict[str, Run] = {}

    def checkpoint(self, experiment: Experiment) -> None:
        """Return None: there is no file to resume from."""
        return

    def prepare(self) -> None:
        """Do nothing: memory can always be written."""

    def add(self, run: Run) -> None:
        """Store a run under its key."""
        self._runs[run.key] = run

    def runs(self) -> dict[str, Run]:
        """Return the runs by key."""
        return self._runs


def _is_cut_short(line: bytes) -> bool:
    """Return whether a crash cut this line short, perhaps in the middle of a character.

    A line that does not start like a run belongs to another kind of file.
    """
    try:
        json.loads(line)
    except ValueError:
        return not line or line.startswith(b"{")
    return False
