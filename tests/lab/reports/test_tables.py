"""Tests of tables, reports and charts of a comparison."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from fairfleet.lab.reports import chart_data, html_report, png_charts, tables
from fairfleet.lab.reports.measures import MEASURES, spread
from fairfleet.lab.reports.result_rows import failed_runs, result_rows
from fairfleet.lab.reports.table_export import as_csv, as_json
from tests.support.samples.sweeps import made

RUNS = [
    made("a", 0, [0.2, 0.4]),
    made("a", 1, [0.4, 0.6]),
    made("b", 0, [0.5, 0.5]),
    made("c", 0, [0.1, 0.9]),
]


def test_a_table_gives_mean_and_deviation_over_the_seeds() -> None:
    first = result_rows(RUNS)[0]
    assert first.seeds == (0, 1)
    assert first.measures["average"] == pytest.approx((40.0, math.sqrt(200.0)))
    assert first.measures["worst_5"].mean == pytest.approx(30.0)
    assert first.measures["improved"].mean == 0.5
    line = as_json([first])[0]
    assert line["average"] == pytest.approx(40.0)
    heading = as_csv([first]).splitlines()[0]
    assert heading.startswith("setting,rule,seeds,seconds,failures,average,")


def test_rho_counts_unchanged_losses_and_the_strict_share_stands_beside_it() -> None:
    old, now = made("old", 0, [0.5, 0.5]), made("now", 0, [0.5, 0.5])
    points = [
        point.model_copy(update={"improved": 0.75, "strictly_improved": 0.25})
        for point in now.points
    ]
    rows = result_rows([old, now.model_copy(update={"points": tuple(points)})])
    shares = {
        row.label: (row.measures["improved"].mean, row.measures["strictly_improved"].mean)
        for row in rows
    }
    assert shares == {"old": (0.5, 0.5), "now": (0.75, 0.25)}  # An older record has one share.


def test_the_pareto_front_has_the_rules_that_none_beats_in_both_figures() -> None:
    dots = {dot.label: dot for dot in chart_data.dots(RUNS)}
    assert [dot.label for dot in chart_data.pareto_front(list(dots.values()))] == ["b"]
    assert (dots["c"].average, dots["c"].worst) == pytest.approx((50.0, 10.0))
    equal = chart_data.dots(
        [made("one", 0, [0.5, 0.5]), made("other", 0, [0.5, 0.5]), made("less", 0, [0.5, 0.4])]
    )
    assert {dot.label for dot in chart_data.pareto_front(equal)} == {"one", "other"}


def test_the_report_is_one_file_that_fetches_nothing() -> None:
    page = html_report.page("a <b>", [*RUNS, made("a", 0, [0.1, 0.2], "other")])
    assert page.count("plotly-graph-div") == 12
    assert "<h2>other</h2>" in page
    assert "a &lt;b&gt;" in page
    own = page[: page.index("<script>")] + page[page.index("</script>") :]
    assert 'src="http' not in own
    assert "link rel" not in own


def test_charts_are_png_files_for_each_setting(tmp_path: Path) -> None:
    written = png_charts.draw(
        [*RUNS, made("a", 0, [0.1, 0.2], "Dir(0.1)")], tmp_path / "images", "mine"
    )
    assert {path.name for path in written} >= {
        "mine-mean.png",
        "mine-pareto.png",
        "mine-dir-0-1-clients.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_curves_cover_the_rounds_that_all_seeds_have() -> None:
    line = chart_data.lines(RUNS, "mean", 100.0)[0]
    assert (line.rounds, line.middle) == ([1, 2], pytest.approx([10.0, 20.0]))
    assert chart_data.lines(RUNS, "layer_conflicts") == []
    # This run diverged before its first evaluation.
    early = made("a", 2, []).model_copy(update={"points": (), "failure": "diverged"})
    assert chart_data.lines([*RUNS, early], "mean", 100.0)[0] == line
    assert json.dumps(line.rounds)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_fits_the_terminal_without_cutting_text(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    lost = [
        made("lost", seed, []).model_copy(update={"failure": "diverged"} if seed else {})
        for seed in range(11)
    ]
    long = made("a rule of many words", 0, [0.1, 0.2], "other")
    console.print(tables.table(result_rows([*RUNS, *lost, long]), width))
    shown = console.export_text()
    assert "…" not in shown
    assert all(shown.count(measure.heading) >= 2 for measure in MEASURES)


def test_a_table_with_short_names_fits_every_width() -> None:
    for width in range(60, 140):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(tables.table(result_rows(RUNS), width))
        assert "…" not in console.export_text()


def test_a_row_says_how_many_of_its_seeds_failed() -> None:
    failed = [
        made("a", seed, [0.1, 0.1]).model_copy(update={"failure": "it diverged"}) for seed in (2, 3)
    ]
    row = result_rows([*RUNS, *failed])[0]
    assert row.seeds_text == "2 of 4"
    assert failed_runs([*RUNS, *failed]) == ["a, seed 2: it diverged", "a, seed 3: it diverged"]
    page = html_report.page("mine", [*RUNS, *failed])
    assert "2 of 4" in page
    assert "failed: a, seed 3: it diverged" in page


def test_one_seed_has_no_deviation() -> None:
    assert as_json(result_rows(RUNS))[1]["average_over_seeds"] is None
    assert spread([math.nan, 1.0, math.nan]).format(2) == "1.00"
    assert spread([1.0, 1.0]).format(2) == "1.00 ± 0.00"


@pytest.mark.slow
def test_settings_and_rules_of_any_name_are_drawn(tmp_path: Path) -> None:
    """Cover invalid formulas, names that differ in punctuation only, and a leading underscore."""
    labels = [(r"$\nope$", "lr+1"), ("_mine", "lr-1"), ("plain", r"$\q$"), ("plain", "!!")]
    drawn = [made(label, seed, [0.2, 0.4], setting) for label, setting in labels for seed in (0, 1)]
    written = png_charts.draw(drawn, tmp_path, "mine")
    assert len(set(written)) == len(list(tmp_path.iterdir())) == 4 * len(png_charts.KINDS)
    axes = png_charts.plt.figure().add_subplot()
    png_charts.curve(axes, drawn[2:4], "mean", "")
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_mine"]
