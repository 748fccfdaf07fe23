"""What is drawn and printed of runs that failed, of attackers, and of names that look like markup."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fairfleet.lab import figures, plots, report, tables
from fairfleet.lab.experiment import Experiment
from fairfleet.lab.local import Result
from fairfleet.lab.records import Point, Run
from fairfleet.lab.summary import summarise

HONEST_ONLY = "honest clients only"


def made(label: str, seed: int, accuracy: list[float], **fields: object) -> Run:
    point = Point(
        round=2, mean=0.5, deviation=0.1, worst_5=0.3, best_5=0.9, loss=1.0, improved=0.5, conflicts=0.2,
        layer_conflicts=None,
    )  # fmt: skip
    known = {
        "key": f"{label}{seed}", "label": label, "experiment": Experiment(seed=seed, rounds=2), "complete": True,
        "rounds": 2, "seconds": 1.0, "training_seconds": 0.5, "accuracy": accuracy, "points": [point],
    }  # fmt: skip
    return Run.model_validate(known | fields)


GOOD = [made("a", 0, [0.2, 0.4]), made("a", 1, [0.4, 0.6]), made("a", 2, [0.3, 0.3])]
DIVERGED = [made("a", 3, [0.9, 0.9], failure="diverged"), made("b", 0, [0.1, 0.1], failure="diverged")]


def test_runs_that_failed_are_in_no_picture_of_results() -> None:
    runs = [*GOOD, *DIVERGED]
    assert figures.dots(runs) == figures.dots(GOOD)
    assert figures.accuracies(runs) == figures.accuracies(GOOD)
    assert [trace.name for trace in report.distributions(runs).data] == ["a"]
    axes = Figure().add_subplot()
    plots.distributions(axes, runs)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a"]


def test_a_rule_has_the_colour_that_it_has_in_the_curves_when_another_failed() -> None:
    runs = [DIVERGED[1], *GOOD]
    [violin] = report.distributions(runs).data
    assert violin.line.color == figures.colour("a", ["b", "a"])


def test_error_bars_are_the_deviations_of_the_table() -> None:
    runs = [*GOOD, *DIVERGED]
    [dot], row = figures.dots(runs), tables.rows(runs)[0]
    assert (dot.average, dot.average_spread) == row.measures["average"]
    assert (dot.worst, dot.worst_spread) == row.measures["worst_5"]


def test_a_setting_in_which_everything_failed_has_a_table_and_no_pictures(tmp_path: Path) -> None:
    early = made("c", 0, [], failure="diverged", points=[])  # before anything was measured
    for runs in (DIVERGED, [early]):
        assert plots.draw([*runs, made("a", 0, [0.5], setting="other")], tmp_path, "x", ["mean", "clients"]) == [
            tmp_path / "x-other-mean.png",
            tmp_path / "x-other-clients.png",
        ]
    assert "failed" in printed(tables.table(tables.rows(DIVERGED)))
    page = report.page("none", DIVERGED)
    assert page.count("plotly-graph-div") == 6
    assert page.count("<td>failed</td>") == 2


@pytest.mark.parametrize(("cheats", "said"), [((), False), ((1,), True)])
def test_pictures_without_the_attackers_say_so(cheats: tuple[int, ...], said: bool) -> None:
    runs = [*GOOD, made("a, attacked", 0, [0.2, 0.4], dishonest=cheats)]

    def drawn(draw: Callable[..., None], *words: str) -> tuple[str, str]:
        axes = Figure().add_subplot()
        draw(axes, runs, *words)
        return axes.get_xlabel(), axes.get_ylabel()

    assert all((HONEST_ONLY in words) == said for words in drawn(plots.pareto))
    for _, words in (drawn(plots.curve, "mean", "average"), drawn(plots.distributions)):
        assert (HONEST_ONLY in words) == said
    layout = report.pareto_plot(runs).layout
    assert (HONEST_ONLY in layout.xaxis.title.text) == (HONEST_ONLY in layout.yaxis.title.text) == said
    for figure in (report.curve(runs, *report.CURVES[0]), report.distributions(runs)):
        assert (HONEST_ONLY in figure.layout.title.text) == said


def test_conflicts_are_of_all_clients_attackers_too() -> None:
    runs = [made("a", 0, [0.2, 0.4], dishonest=[1])]
    axes = Figure().add_subplot()
    plots.curve(axes, runs, "conflicts", "conflicts (%)")
    assert axes.get_ylabel() == "conflicts (%)"
    assert HONEST_ONLY not in report.curve(runs, *report.CURVES[3]).layout.title.text


@pytest.mark.parametrize("name", ["[/b]", "[red]", "fedavg [bold]x", r"a\[b]"])
def test_a_name_that_looks_like_markup_is_printed_as_it_is(name: str) -> None:
    runs = [made(name, 0, [0.2, 0.4], setting=name), made("b", 0, [0.2, 0.4], setting=name)]
    lines = printed(tables.table(tables.rows(runs))).splitlines()
    assert lines[0].strip() == name
    assert lines[2].startswith(name)


def test_a_rule_of_the_demo_is_printed_as_it_is_likewise() -> None:
    results = [
        Result("demo", rule, 1, 1, {"ann": 0.5}, (), 1.0, 1, 1, Path("model"), Path("logs")) for rule in ("[/b]", "b")
    ]
    assert "time of [/b]" in printed(summarise(results, ""))


def printed(what: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(what)
    return out.getvalue()
