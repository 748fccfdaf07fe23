"""The summary of one or more federations."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from fairfleet.lab.demo.local_federation import Result
from fairfleet.lab.demo.summary import as_json, served_badly, summarise


def result(rule: str, **accuracy: float) -> Result:
    return Result(
        name="demo",
        rule=rule,
        rounds=100,
        parameters=650,
        accuracy=accuracy,
        evaluations=(),
        seconds=12.3,
        bytes_sent=2_700_000,
        bytes_received=2_600_000,
        output=Path("out [1]/model.safetensors"),
        logs=Path("logs"),
    )


FEDAVG = result("fedavg", rotated=0.3, a=0.9, b=0.92, c=0.96)
FAIR = result("adafed", rotated=0.7, a=0.85, b=0.9, c=0.91)


def rendered(*results: Result, columns: int = 80) -> list[str]:
    console = Console(
        width=columns, file=io.StringIO(), record=True, color_system=None, highlight=False
    )
    console.print(summarise(results, "That is why."))
    return console.export_text().splitlines()


def test_the_summary_names_the_worst_client_the_mean_and_the_spread() -> None:
    text = "\n".join(rendered(FEDAVG))
    for part in (
        "mean 77.0 %",
        "worst rotated 30.0 %",
        "standard deviation 27.2",
        "Served badly: rotated.",
    ):
        assert part in text
    for part in (
        "That is why.",
        "12.3 s for 100 rounds",
        "2.7 MB to clients, 2.6 MB from them",
        "out [1]/model",
    ):
        assert part in text


def test_two_federations_stand_side_by_side_in_the_order_of_the_first() -> None:
    rows = [line.split() for line in rendered(FEDAVG, FAIR, columns=120) if line.count("%") == 2]
    compared = {
        row[0]: [word for word in row if word[0].isdigit()]
        for row in rows
        if not row[0].endswith(":")
    }
    assert list(compared) == ["rotated", "a", "b", "c", "mean"]
    assert compared["rotated"] == ["30.0", "70.0"]
    assert all(len(line) <= 120 for line in rendered(FEDAVG, FAIR, columns=120))


def test_no_client_is_served_badly_if_all_have_the_same_accuracy() -> None:
    assert served_badly(result("fedavg", a=0.9, b=0.9)) == []


def test_the_json_result_has_every_client_and_every_measure() -> None:
    (federation,) = json.loads(json.dumps(as_json([FEDAVG])))["federations"]
    assert federation["accuracy"]["rotated"] == 0.3
    assert federation["fairness"]["min"] == 0.3
    assert federation["model"].endswith("model.safetensors")
