"""The table of `fairfleet clients`, and a summary of which software the clients have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fairfleet.proto.v1 import operator_pb2 as pb

STATES = {
    number: name.removeprefix("CLIENT_STATE_").lower() for name, number in pb.ClientState.items()
}
COLUMNS = (
    "state",
    "device",
    "software",
    "samples",
    "updates",
    "last",
    "accuracy",
    "loss",
    "version",
)


def columns(records: Sequence[pb.ClientRecord], measure: str) -> list[str]:
    """Return the columns to show, because screens are narrow.

    The software is shown only where clients differ, accuracy and loss only where one has them. A
    measure of the tasks' own, by which clients are compared, has a column of its own.
    """
    hidden = set() if len({record.software for record in records}) > 1 else {"software"}
    hidden |= {
        name
        for name in ("accuracy", "loss")
        if name != measure and not any(record.evaluation.HasField(name) for record in records)
    }
    shown = [name for name in COLUMNS if name not in hidden]
    return shown if measure in COLUMNS else [*shown, measure]


def cells(record: pb.ClientRecord, shown: Sequence[str]) -> list[str]:
    """Return a client's row, a cell for each of the columns."""
    row = dict(zip(COLUMNS, _all_cells(record), strict=True))
    own = {measure.name: f"{measure.value:.4f}" for measure in record.evaluation.measures}
    return [row.get(column) or own.get(column, "-") for column in shown]


def _all_cells(record: pb.ClientRecord) -> list[str]:
    evaluation = record.evaluation if record.HasField("evaluation") else None
    return [
        STATES[record.state],
        record.device or "-",
        record.software.removeprefix("fairfleet ") or "-",
        str(record.train_samples or "-"),
        str(record.updates_counted),
        str(record.last_counted_round + 1) if record.HasField("last_counted_round") else "-",
        f"{100 * evaluation.accuracy:.1f} %"
        if evaluation and evaluation.HasField("accuracy")
        else "-",
        f"{evaluation.loss:.4f}" if evaluation and evaluation.HasField("loss") else "-",
        str(record.evaluated_version) if record.HasField("evaluated_version") else "-",
    ]


def remarks(records: Sequence[pb.ClientRecord], server_software: str) -> list[str]:
    """Return the lines below the table: the software in use, and who is not selected and why."""
    counts = Counter(record.software or "unknown" for record in records)
    lines = list[str]()
    if set(counts) - {"unknown"}:
        software = ", ".join(f"{count} with {name}" for name, count in counts.most_common())
        lines.append(f"software: {software}; server: {server_software or 'unknown'}")
    return lines + [
        f"{record.client} is not selected: {record.not_selected_because}"
        for record in records
        if record.not_selected_because
    ]
