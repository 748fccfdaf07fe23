"""What is kept of a run: one line of JSON in a ledger, so that a sweep goes on where it was left.

A run that was interrupted is kept as well, marked as incomplete; it is run anew, or taken up from its checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from fairfleet.common.errors import UsageError
from fairfleet.common.fairness import Fairness
from fairfleet.lab.experiment import Experiment


class Point(BaseModel):
    """What is known after an evaluated round; counts are means over the rounds since the point before."""

    model_config = ConfigDict(frozen=True)

    round: int  # as many were done
    mean: float
    deviation: float
    worst_5: float
    best_5: float
    loss: float | None  # mean training loss of the rounds' clients, on the models they received
    improved: float | None  # share of the last round's clients whose loss fell
    conflicts: float | None  # share of the rounds' clients that the direction would harm
    layer_conflicts: float | None
    worst_10: float | None = None  # runs that were recorded earlier lack it
    best_10: float | None = None
    factor: float | None = None  # of the steps that were taken, where they were verified or searched for
    update_bytes: float | None = None  # of an update as it was sent, where its codec is lossy; see `coding.Coded`
    gram_error: float | None = None
    flipped: float | None = None


class Run(BaseModel):
    """One line of the record."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")  # epsilon without noise is infinite

    key: str
    label: str  # of the rule, as the sweep calls it
    setting: str = ""
    experiment: Experiment
    complete: bool
    failure: str = ""
    rounds: int  # done
    seconds: float
    training_seconds: float
    accuracy: tuple[float | None, ...] = ()  # of each client in the order of names, at the end
    losses: tuple[float | None, ...] = ()
    personal: tuple[float | None, ...] = ()  # accuracies of Ditto's personal models
    tested: tuple[int, ...] = ()  # on so many samples each
    parameters: int = 0  # of the model; 0: recorded before they were counted
    dishonest: tuple[int, ...] = ()  # places of attackers among them
    admission: dict[str, tuple[int, int]] = {}  # decisions (`loss winsorised`): of honest clients, of attackers
    points: tuple[Point, ...] = ()
    epsilon: float | None = None  # of differential privacy, where noise was added
    made_by: str = ""
    unix_seconds: float = 0.0

    @property
    def honest(self) -> list[float]:
        """The accuracies that count: of clients with test samples that do not cheat."""
        return self._of_honest(self.accuracy)

    @property
    def honest_personal(self) -> list[float]:
        """The same of personal models, where there are any."""
        return self._of_honest(self.personal)

    def _of_honest(self, values: tuple[float | None, ...]) -> list[float]:
        cheats = set(self.dishonest)
        return [value for at, value in enumerate(values) if value is not None and at not in cheats]

    @property
    def fairness(self) -> Fairness:
        return Fairness.of(self.honest)

    @property
    def improved(self) -> float:
        """Mean over the training's evaluated rounds."""
        return self.over_points("improved")

    def over_points(self, field: str) -> float:
        """The mean of a field; NaN where no point has it."""
        known = [value for point in self.points if (value := getattr(point, field)) is not None]
        return float(np.mean(known)) if known else math.nan


class Ledger:
    """A file of runs. Lines are only ever added; of several lines with one key, the last complete one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoint(self, experiment: Experiment) -> Path | None:
        """Where a run that is under way may be kept."""
        return self.path.with_suffix(".partial") / f"{experiment.key()}.npz"

    def prepare(self) -> None:
        """Before hours of work: whether its result can be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise UsageError(
                f"runs cannot be recorded in {self.path}: {error.strerror}; choose another place"
            ) from None

    def add(self, found: Run) -> None:
        self.prepare()
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last line was cut short by a crash
                    file.write(b"\n")
            file.write(found.model_dump_json(exclude_defaults=True).encode() + b"\n")

    def runs(self) -> dict[str, Run]:
        """By key; incomplete ones only where there is no other."""
        found: dict[str, Run] = {}
        for one in self._lines():
            if one.complete or not (one.key in found and found[one.key].complete):
                found[one.key] = one
        return found

    def _lines(self) -> Iterable[Run]:
        if not self.path.is_file():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            try:
                yield Run.model_validate_json(line)
            except ValidationError as error:
                if _cut_short(line):  # the process was killed while it wrote
                    continue
                raise UsageError(
                    f"{self.path}, line {number}, is not a run of this version ({error.error_count()} mistakes, first: "
                    f"{error.errors()[0]['msg']}); move the file away to begin anew"
                ) from None


class InMemory(Ledger):
    """For runs that nobody wants to keep."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._kept: dict[str, Run] = {}

    def checkpoint(self, experiment: Experiment) -> None:
        return None

    def prepare(self) -> None:
        pass

    def add(self, found: Run) -> None:
        self._kept[found.key] = found

    def runs(self) -> dict[str, Run]:
        return self._kept


def _cut_short(line: bytes) -> bool:
    """Perhaps in the middle of a character. What does not begin like a run is of another kind of file."""
    try:
        json.loads(line)
    except ValueError:
        return not line or line.startswith(b"{")
    return False
