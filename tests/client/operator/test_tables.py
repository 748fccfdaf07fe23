"""The tables of `fairfleet clients` and `fairfleet models`."""

from __future__ import annotations

import io

from rich.console import Console

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
