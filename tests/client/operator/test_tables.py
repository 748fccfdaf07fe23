"""The tables of `fairfleet clients` and `fairfleet models`."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from fairfleet.client.operator.client_table import cells, columns
from fairfleet.client.operator.full_tables import print_in_full
from fairfleet.client.operator.model_table import models_table, print_models
from fairfleet.proto.v1 import fleet_pb2
from fairfleet.proto.v1 import operator_pb2 as pb


def test_an_evaluation_on_the_server_shows_the_measures_that_it_has() -> None:
    auc = fleet_pb2.Measure(name="auc", value=0.75, direction=fleet_pb2.DIRECTION_HIGHER)
    record = pb.ModelRecord(
        version=3, server_evaluation=fleet_pb2.Evaluation(samples=9, measures=[auc])
    )
    shown = io.StringIO()
    Console(file=shown, width=200).print(models_table([record]))
    assert "auc 0.75" in shown.getvalue()
    assert "loss" not in shown.getvalue()


def test_the_list_of_models_fits_a_terminal_of_80_columns() -> None:
    scores = [pb.VersionScore(measure=name, mean=0.5) for name in ("accuracy", "loss")]
    record = pb.ModelRecord(
        version=120,
        size_bytes=10**8,
        unix_seconds=1.8e9,
        kept_because=["newest", "best"],
        scores=scores,
    )
    shown = io.StringIO()
    Console(file=shown, width=80).print(models_table([record]))
    assert "…" not in shown.getvalue()
    assert all(
        text in shown.getvalue() for text in ("version", "accuracy", "100.0 MB", "2027-01-1")
    )


def listed(width: int, *measures: str, own: bool = False) -> str:
    """Return what `fairfleet models` prints of two versions with these measures."""
    scores = [
        pb.VersionScore(measure=name, mean=1.234567e-06, worst_10_percent=1.0) for name in measures
    ]
    records = [
        pb.ModelRecord(version=0, size_bytes=828, unix_seconds=1.8e9, kept_because=["initial"]),
        pb.ModelRecord(version=7, kept_because=["newest", "best"], scores=scores),
    ]
    if own:
        records[1].server_evaluation.accuracy = 0.987
    shown = io.StringIO()
    print_models(records, Console(file=shown, width=width))
    return shown.getvalue()


def test_a_narrow_terminal_shows_every_reason_and_figure_in_full() -> None:
    text = listed(80, "accuracy", "loss")
    assert "…" not in text
    assert all(word in text for word in ("initial", "newest", "best", "1.2e-06", "100.0 %"))
    assert max(map(len, text.splitlines())) <= 80


def test_no_column_is_left_out_where_there_are_many_measures() -> None:
    names = ("accuracy", "auc", "f1", "loss", "perplexity_of_the_whole")
    text = listed(80, *names, own=True)
    assert "…" not in text
    assert all(word in text for word in (*names, "initial", "newest and best", "98.7 %"))


def test_the_list_of_clients_cuts_no_cell_where_their_software_differs() -> None:
    evaluation = fleet_pb2.Evaluation(samples=9, loss=0.1234, accuracy=0.5)
    records = [
        pb.ClientRecord(
            client=f"kitchen-{number}",
            state=pb.CLIENT_STATE_TRAINING,
            device="cuda",
            software=f"fairfleet 0.{number}.0",
            train_samples=12_000,
            evaluation=evaluation,
            evaluated_version=100,
        )
        for number in range(2)
    ]
    names = columns(records, "accuracy")
    table = Table("client", *names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for record in records:
        table.add_row(record.client, *cells(record, names))
    shown = io.StringIO()
    print_in_full(table, Console(file=shown, width=80))
    assert "…" not in shown.getvalue()
    assert all(word in shown.getvalue() for word in (*names, "training", "0.1.0", "kitchen-1"))


def test_clients_have_no_column_for_what_none_of_them_reports() -> None:
    auc = fleet_pb2.Measure(name="auc", value=0.75, direction=fleet_pb2.DIRECTION_HIGHER)
    record = pb.ClientRecord(
        client="ann", evaluation=fleet_pb2.Evaluation(samples=9, measures=[auc])
    )
    assert {"accuracy", "loss"}.isdisjoint(columns([record], "auc"))
    assert "accuracy" in columns([record], "accuracy")  # which they should report
