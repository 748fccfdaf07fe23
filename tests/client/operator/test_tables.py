"""The tables of `fairfleet clients` and `fairfleet models`."""

from __future__ import annotations

import io

from rich.console import Console

from fairfleet.client.operator.model_table import models_table
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
