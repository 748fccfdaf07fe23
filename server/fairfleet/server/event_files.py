"""What TensorBoard is told of a federation: the same story as the page and the metrics, over rounds and versions."""

from __future__ import annotations

from pathlib import Path

from fairfleet.common.event_files import EventFiles
from fairfleet.common.fairness import Fairness, mean, worst
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.measures import Served, StepTaken

TAILS = ("worst_5", "worst_10", "best_5", "best_10")
MEASURES = ("mean", "standard_deviation", *TAILS, "angle_degrees", "gini", "jain", "kl_to_uniform")


class FederationFiles:
    def __init__(self, folder: Path) -> None:
        self._files = EventFiles(folder)

    def committed(self, record: pb.RoundRecord, step: StepTaken) -> None:
        losses = [contribution.report.loss_before for contribution in record.contributions]
        told = {
            "training/loss_mean": mean(losses),
            "training/loss_worst_10_percent": worst(losses, 10, higher_is_better=False),
            "step/conflicting_clients": float(len(step.conflicts)),
            "step/conflicting_clients_share": len(step.conflicts) / max(1, len(record.contributions)),
            "step/conflicting_layers": float(step.conflicting_layers),
            "step/direction_norm": step.norm,
            "round/training_seconds": record.training_seconds,
            "round/aggregation_seconds": record.aggregation_seconds,
            "round/updates": float(len(record.contributions)),
            "round/dropped": float(len(record.dropped)),
        }
        self._files.scalars(record.round, told, record.unix_seconds)
        if step.coefficients:
            values = list(step.coefficients.values())
            self._files.distribution(record.round, "step/coefficients", values, record.unix_seconds)
        self._files.flush()

    def evaluated(self, served: Served, unix_seconds: float) -> None:
        accuracies = [found.accuracy for found in served.evaluations.values() if found.accuracy is not None]
        self._files.scalars(served.version, {"evaluation/improved_clients": served.improved}, unix_seconds)
        losses = [found.loss for found in served.evaluations.values()]
        if served.loss:
            self._measure("loss", served.version, served.loss, losses, unix_seconds)
        if served.accuracy:
            self._measure("accuracy", served.version, served.accuracy, accuracies, unix_seconds)
        self._files.flush()

    def _measure(self, name: str, version: int, fairness: Fairness, values: list[float], unix_seconds: float) -> None:
        told = {f"{name}/{measure}": getattr(fairness, measure) for measure in MEASURES}
        self._files.scalars(version, told, unix_seconds)
        self._files.distribution(version, f"{name}/clients", values, unix_seconds)

    def close(self) -> None:
        self._files.close()
