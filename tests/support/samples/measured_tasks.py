"""Tasks that report measures of their own; the values follow from the version of the model.

Every training moves the model by `shift`, so the distance from 0 counts the committed rounds.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tasks import ShiftTask  # the folder of this module is the current one

from fairfleet.client import Evaluation, higher, lower
from fairfleet.common.tensors import Arrays


class MeasuredTask(ShiftTask):
    """Reports `name` as slope * version + offset, at most `most`, and a loss only if it has one."""

    name, direction, slope, offset, most = "auc", "higher", 0.1, 0.0, 1.0
    loss: float | None = None

    def evaluate(self, model: Arrays) -> Evaluation:
        version = abs(float(model["weight"][0]))
        value = min(self.slope * version + self.offset, self.most)
        measure = higher(value) if self.direction == "higher" else lower(value)
        return Evaluation(samples=10, loss=self.loss, measures={self.name: measure})


def measured(
    size: str = "1000",
    samples: str = "10",
    shift: str = "1",
    tested: str = "10",
    measure: str = "auc",
    direction: str = "higher",
    slope: str = "0.1",
    offset: str = "0",
    most: str = "1",
    loss: str = "",
) -> MeasuredTask:
    task = MeasuredTask(float(shift), int(size), int(samples), 1, 0.0, "", 0.0, 0.5, int(tested))
    task.name, task.direction = measure, direction
    task.slope, task.offset, task.most = float(slope), float(offset), float(most)
    task.loss = float(loss) if loss else None
    return task


class HeldOutTask(MeasuredTask):
    """The server's own test set. It notes its process, and can hang, fail or die."""

    trace, trouble = "", ""

    def evaluate(self, model: Arrays) -> Evaluation:
        version = round(abs(float(model["weight"][0])))
        with open(self.trace, "a") as file:
            file.write(f"{os.getpid()} {version}\n")
        print("a task may print")  # which must not disturb what the worker says to the server
        if self.trouble == "fail" and version == 2:
            raise RuntimeError("no memory left")
        if self.trouble == "dies" and version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "hang" and version == 2:
            time.sleep(600)
        if self.trouble == "slow" and version == 2:
            time.sleep(3)
        if self.trouble == "odd" and version == 2:
            return {"auc": 0.5}  # type: ignore[return-value]
        if self.trouble == "nan" and version == 2:
            return Evaluation(samples=10, measures={"auc": higher(float("nan"))})
        if self.trouble == "exit" and version == 2:
            raise SystemExit("enough")
        return super().evaluate(model)


def held_out(trace: str, size: str = "1000", trouble: str = "") -> HeldOutTask:
    Path(trace).touch()
    if trouble == "loads":
        Path(trace).write_text(f"{os.getpid()} 0\n")
        time.sleep(600)
    task = HeldOutTask(1.0, int(size), 10, 1, 0.0, "", 0.0, 0.5, 10)
    task.trace, task.trouble = trace, trouble
    return task


def broken() -> HeldOutTask:
    import no_such_module  # type: ignore[import-not-found]

    return no_such_module  # type: ignore[no-any-return]
