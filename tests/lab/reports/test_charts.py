"""Tests of charts and tables with failed runs, attackers, and names that look like markup."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fairfleet.lab.demo.local_federation import Result
from fairfleet.lab.demo.summary import summarise
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Point, Run
from fairfleet.lab.reports import chart_data, html_report, png_charts, tables
from fairfleet.lab.reports.result_rows import result_rows

HONEST_ONLY = "honest clients only"


def make_run(label: str, seed: int, accuracy: list[float], **fields: object) -> Run:
    """Return a complete run with one point and these final accuracies."""
    point = Point(
        round=2,
        mean=0.5,
        deviation=0.1,
        worst_5=0.3,
        best_5=0.9,
        loss=1.0,
        improved=0.5,
        conflicts=0.2,
        layer_conflicts=None,
    )
    defaults = {
        "key": f"{label}{seed}",
        "label": label,
        "experiment": Experiment(seed=seed, rounds=2),
        "complete": True,
        "rounds": 2,
        "seconds": 1.0,
        "training_seconds": 0.5,
        "accuracy": accuracy,
        "points": [point],
    }
    return Run.model_validate(defaults | fields)


GOOD = [make_run("a", 0, [0.2, 0.4]), make_run("a", 1, [0.4, 0.6]), make_run("a", 2, [0.3, 0.3])]
DIVERGED = [
    make_run("a", 3, [0.9, 0.9], failure="diverged"),
    make_run("b", 0, [0.1, 0.1], failure="diverged"),
]


def test_failed_runs_are_in_no_chart_of_results() -> None:
    runs = [*GOOD, *DIVERGED]
    assert chart_data.dots(runs) == chart_data.dots(GOOD)
    assert chart_data.accuracies(runs) == chart_data.accuracies(GOOD)
    assert [trace.name for trace in html_report.distributions(runs).data] == ["a"]
    axes = Figure().add_subplot()
    png_charts.distributions(axes, runs)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a"]


def test_a_rule_keeps_its_colour_in_all_charts_when_another_rule_failed() -> None:
    runs = [DIVERGED[1], *GOOD]
    [violin] = html_report.distributions(runs).data
    assert violin.line.color == chart_data.colour("a", ["b", "a"])


def test_error_bars_are_the_deviations_of_the_table() -> None:
    runs = [*GOOD, *DIVERGED]
    [dot], row = chart_data.dots(runs), result_rows(runs)[0]
    assert (dot.average, dot.average_spread) == row.measures["average"]
    assert (dot.worst, dot.worst_spread) == row.measures["worst_5"]


def test_a_setting_in_which_all_runs_failed_has_a_table_and_no_png_charts(tmp_path: Path) -> None:
    early = make_run("c", 0, [], failure="diverged", points=[])  # before the first evaluation
    for runs in (DIVERGED, [early]):
        assert png_charts.draw(
            [*runs, make_run("a", 0, [0.5], setting="other")], tmp_path, "x", ["mean", "clients"]
        ) == [
            tmp_path / "x-other-mean.png",
            tmp_path / "x-other-clients.png",
        ]
    assert "failed" in printed(tables.table(result_rows(DIVERGED)))
    page = html_report.page("none", DIVERGED)
    assert page.count("plotly-graph-div") == 6
    assert page.count("<td>failed</td>") == 2


@pytest.mark.parametrize(("attackers", "is_said"), [((), False), ((1,), True)])
def test_charts_without_the_attackers_say_so(attackers: tuple[int, ...], is_said: bool) -> None:
    runs = [*GOOD, make_run("a, attacked", 0, [0.2, 0.4], dishonest=attackers)]

    def axis_labels(draw: Callable[..., None], *arguments: str) -> tuple[str, str]:
        axes = Figure().add_subplot()
        draw(axes, runs, *arguments)
        return axes.get_xlabel(), axes.get_ylabel()

    assert all((HONEST_ONLY in label) == is_said for label in axis_labels(png_charts.pareto))
    for _, y_label in (
        axis_labels(png_charts.curve, "mean", "average"),
        axis_labels(png_charts.distributions),
    ):
        assert (HONEST_ONLY in y_label) == is_said
    layout = html_report.pareto_plot(runs).layout
    for axis in (layout.xaxis, layout.yaxis):
        assert (HONEST_ONLY in axis.title.text) == is_said
    for figure in (
        html_report.curve(runs, *html_report.CURVES[0]),
        html_report.distributions(runs),
    ):
        assert (HONEST_ONLY in figure.layout.title.text) == is_said


def test_conflicts_cover_all_clients_including_attackers() -> None:
    runs = [make_run("a", 0, [0.2, 0.4], dishonest=[1])]
    axes = Figure().add_subplot()
    png_charts.curve(axes, runs, "conflicts", "conflicts (%)")
    assert axes.get_ylabel() == "conflicts (%)"
    assert HONEST_ONLY not in html_report.curve(runs, *html_report.CURVES[3]).layout.title.text


@pytest.mark.parametrize("name", ["[/b]", "[red]", "fedavg [bold]x", r"a\[b]"])
def test_a_name_that_looks_like_markup_is_printed_unchanged(name: str) -> None:
    runs = [make_run(name, 0, [0.2, 0.4], setting=name), make_run("b", 0, [0.2, 0.4], setting=name)]
    lines = printed(tables.table(result_rows(runs))).splitlines()
    assert lines[0].strip() == name
    assert lines[2].startswith(name)


def test_a_rule_of_the_demo_that_looks_like_markup_is_printed_unchanged() -> None:
    results = [
        Result("demo", rule, 1, 1, {"ann": 0.5}, (), 1.0, 1, 1, Path("model"), Path("logs"))
        for rule in ("[/b]", "b")
    ]
    assert "time of [/b]" in printed(summarise(results, ""))


def printed(renderable: object) -> str:
    """Return what a wide console prints."""
    text = io.StringIO()
    Console(file=text, width=200).print(renderable)
    return text.getvalue()


def test_the_report_is_titled_by_its_data_and_says_what_was_run() -> None:
    runs = [run.model_copy(update={"made_by": "fairfleet 9", "parameters": 650}) for run in GOOD]
    title = html_report.title_of("comparison", runs)
    assert title == "Comparison of rules on digits-rotated"
    assert html_report.title_of("mine", runs).endswith(" (mine)")
    page = html_report.page(title, runs, command="fairfleet compare --rounds 2")
    assert f"<h1>{title}</h1>" in page
    for name, text in {
        "data": "digits-rotated, partition user",
        "model": "softmax+zero (650 parameters)",
        "plan": "steps 10, batch size 32, learning rate 0.1, solver sgd",
        "fairfleet": "fairfleet 9",
        "command": "fairfleet compare --rounds 2",
    }.items():
        assert f"<tr><th>{name}</th><td>{text}</td></tr>" in page
