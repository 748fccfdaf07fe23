"""TensorBoard event files of a federation: training by round, evaluation by model version.

The figures are those of the dashboard and the metrics.
"""

from __future__ import annotations

from pathlib import Path

from fairfleet.common.fairness import Fairness, mean, worst
from fairfleet.common.tensorboard import EventFiles
from fairfleet.common.wire import measured_as
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.monitoring.measures import FleetEvaluation, StepTaken
from fairfleet.server.storage.server_evaluation_table import ServerEvaluation

TAILS = ("worst_5", "worst_10", "best_5", "best_10")
MEASURES = ("mean", "standard_deviation", *TAILS, "angle_degrees", "gini", "jain", "kl_to_uniform")


class FederationEventFiles:
    """Writes event files to a folder; each call writes what it was given to disk."""

    def __init__(self, folder: Path) -> None:
        self._files = EventFiles(folder)

    def write_round(self, record: pb.RoundRecord, step: StepTaken) -> None:
        """Write the figures of a committed round."""
        self._files.scalars(record.round, _round_scalars(record, step), record.unix_seconds)
        if step.coefficients:
            values = list(step.coefficients.values())
            self._files.distribution(record.round, "step/coefficients", values, record.unix_seconds)
        self._files.flush()

    def write_evaluation(self, evaluation: FleetEvaluation, unix_seconds: float) -> None:
        """Write the figures of a finished evaluation."""
        version = evaluation.version
        scalars = {
            "evaluation/improved_clients": evaluation.improved,
            "evaluation/strictly_improved_clients": evaluation.strictly_improved,
        }
        self._files.scalars(version, scalars, unix_seconds)
        for name, fairness in evaluation.fairness.items():
            values = evaluation.values(name)
            self._write_measures(name, version, fairness, values, unix_seconds)
        self._files.flush()

    def _write_measures(
        self, name: str, version: int, fairness: Fairness, values: list[float], unix_seconds: float
    ) -> None:
        scalars = {f"{name}/{measure}": getattr(fairness, measure) for measure in MEASURES}
        self._files.scalars(version, scalars, unix_seconds)
        self._files.distribution(version, f"{name}/clients", values, unix_seconds)

    def write_server_evaluation(self, result: ServerEvaluation, unix_seconds: float) -> None:
        """Write the figures of a version on the server's own test data."""
        figures = result.evaluation.figures() if result.evaluation else {}
        scalars = {f"server/{name}": figure.value for name, figure in figures.items()}
        self._files.scalars(result.version, scalars, unix_seconds)
        self._files.flush()

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _round_scalars(record: pb.RoundRecord, step: StepTaken) -> dict[str, float | None]:
    """Return the scalars of a round; those that were not computed are None and not written."""
    reports = [contribution.report for contribution in record.contributions]
    losses, measured = [report.loss_before for report in reports], measured_as(reports)
    loss = "loss" if measured == "exact" else f"loss_{measured}"  # such losses do not compare
    conflicts = None if step.conflicts is None else len(step.conflicts)
    share = None if conflicts is None else conflicts / max(1, len(record.contributions))
    return {
        f"training/{loss}_mean": mean(losses),
        f"training/{loss}_worst_10_percent": worst(losses, 10, higher_is_better=False),
        "step/conflicting_clients": conflicts,
        "step/conflicting_clients_share": share,
        "step/conflicting_layers": step.conflicting_layers,
        "step/direction_norm": step.norm,
        "round/training_seconds": record.training_seconds,
        "round/aggregation_seconds": record.aggregation_seconds,
        "round/updates": float(len(record.contributions)),
        "round/dropped": float(len(record.dropped)),
    }
