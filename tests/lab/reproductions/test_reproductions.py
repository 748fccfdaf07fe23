"""The reproductions run what the papers say, and their verdicts follow from the figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairfleet.common.errors import UsageError
from fairfleet.lab.cli.reproduce import side_by_side
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.reproductions import LETTERS, REPRODUCTIONS, reproduction
from fairfleet.lab.reproductions.authors import authors_label, authors_ledger, authors_runs
from fairfleet.lab.reproductions.base import Reproduction, above, pooled_accuracy
from fairfleet.lab.reproductions.results_page import complete_runs, section_lines, write_page
from tests.support.paths import ROOT
from tests.support.samples.sweeps import made

EACH = pytest.mark.parametrize("table", REPRODUCTIONS.values(), ids=REPRODUCTIONS)


@EACH
def test_every_published_line_is_run(table: Reproduction) -> None:
    planned = {f"{p.setting} / {p.label}" if p.setting else p.label for p in table.sweep.planned()}
    assert table.published.keys() <= planned
    columns = {column.name for column in table.columns}
    assert all(set(line) <= columns for line in table.published.values())


@EACH
def test_the_quick_version_is_a_part_of_the_full_one(table: Reproduction) -> None:
    quick, full = list(table.quick.planned()), list(table.sweep.planned())
    assert {(p.setting, p.label) for p in quick} <= {(p.setting, p.label) for p in full}
    assert len(quick) < len(full)
    assert {p.experiment.data for p in quick} == {p.experiment.data for p in full}


def test_a_reproduction_is_chosen_by_name_or_letter_and_an_unknown_name_lists_them() -> None:
    assert reproduction("fedfv-table2") is reproduction("a") is LETTERS["A"]
    with pytest.raises(UsageError, match="fedfv-table2"):
        reproduction("fedfv-table9")


def runs_of(table: Reproduction, accuracy: dict[str, list[float]]) -> list[Run]:
    return [made(label, 0, values) for label, values in accuracy.items()]


def test_figures_within_the_tolerance_agree_and_others_are_named() -> None:
    table = reproduction("fedfv-table3")
    runs = runs_of(table, {"FedAvg": [0.90, 0.87, 0.64], "FedFV α=1/3": [0.90, 0.87, 0.50]})
    first, second = (
        verdict
        for verdict in table.verdicts(table.lines(runs))
        if "published" in verdict.words or "off" in verdict.words
    )
    assert first.holds
    assert not second.holds
    assert "std +16.28" in second.words


def test_a_claim_has_no_verdict_without_its_runs_and_then_states_the_gain() -> None:
    table = reproduction("fedfv-table2")
    claim = above("FedFV τ=0", "FedAvg", "mean", "worst 5 %")
    lines = {line.name: line for line in table.lines(runs_of(table, {"FedAvg": [0.2, 0.4]}))}
    assert claim(lines) is None
    both = {
        line.name: line
        for line in table.lines(runs_of(table, {"FedAvg": [0.2, 0.4], "FedFV τ=0": [0.3, 0.4]}))
    }
    verdict = claim(both)
    assert verdict is not None
    assert verdict.holds
    assert "mean +5.00, worst 5 % +10.00" in verdict.words


def test_the_pooled_accuracy_is_over_samples() -> None:
    run = made("x", 0, [0.5, 1.0]).model_copy(update={"tested": (100, 300)})
    assert pooled_accuracy(run) == pytest.approx(87.5)


def changed(table: Reproduction, label: str) -> dict[str, Any]:
    return next(
        p.experiment.model_dump(exclude_unset=True)
        for p in table.sweep.planned()
        if p.label == label
    )


def test_setup_a_is_that_of_the_authors_code() -> None:
    planned = changed(reproduction("A"), "FedAvg")
    assert planned["rounds"] == 2001
    assert planned["plan"] == {"epochs": 1, "batch_size": 0, "learning_rate": 0.1}
    assert planned["model"].endswith("+probabilities")
    assert changed(reproduction("A"), "q-FedAvg q=5")["loss"] == "after"


def test_an_order_of_rules_agrees_only_if_every_step_of_it_does() -> None:
    table = reproduction("D")
    order = ["AdaFedAdam", "FedNova", "q-FedAvg q=1", "FedAdam", "FedAvg"]
    falling = {label: [0.9 - 0.1 * place, 1.0] for place, label in enumerate(order)}
    for accuracy, holds in ((falling, True), ({label: [0.5, 1.0] for label in order}, False)):
        runs = [run.model_copy(update={"tested": (10, 10)}) for run in runs_of(table, accuracy)]
        verdicts = table.verdicts(table.lines(runs))
        assert [verdict.holds for verdict in verdicts] == [holds]


def test_the_page_of_results_is_written_from_the_records_alone(tmp_path: Path) -> None:
    table = reproduction("fedfv-table3")
    planned = next(p for p in table.sweep.planned() if p.label == "FedAvg")
    run = made("FedAvg", 0, [0.90, 0.87, 0.64]).model_copy(
        update={"experiment": planned.experiment, "key": planned.experiment.key()}
    )
    Ledger(tmp_path / "results" / "fedfv-table3.jsonl").add(run)
    (tmp_path / "docs").mkdir()
    write_page(tmp_path / "docs" / "results.md", tmp_path / "results")
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| FedAvg | 1 | 64.00 (64.26) | 87.00 (87.03) | 90.00 (89.97) |" in page
    assert "- agrees: FedAvg: mean and std within 2 of the published figures" in page
    assert page.count("Not run yet.") == 5
    assert (tmp_path / "docs" / "images" / "fedfv-table3-mean.png").exists()


def test_other_readings_and_the_authors_code_are_compared_with_the_line_of_the_rule() -> None:
    table = reproduction("fedlf-table1")
    own = table.published_line("Pat-2", "FedAvg")
    assert own["acc"] == 0.838
    assert table.published_line("Pat-2", "FedAvg, table batch") == own
    assert table.published_line("Pat-2", authors_label("FedAvg", "rate 0.05")) == own
    assert table.published_line("Pat-1", "FedAvg") != own
    assert table.published_line("Pat-2", "AdaFed") == {}


def test_the_page_shows_runs_of_the_authors_code_in_a_table_of_their_own(tmp_path: Path) -> None:
    table = reproduction("fedlf-table1")
    planned = next(p for p in table.sweep.planned() if p.label == "FedFV")
    ours = made("FedFV", 0, [0.9, 0.8]).model_copy(
        update={"experiment": planned.experiment, "key": planned.experiment.key()}
    )
    Ledger(tmp_path / "fedlf-table1.jsonl").add(ours)
    for seed, accuracy in enumerate((0.80, 0.84)):
        theirs = made(authors_label("FedFV"), seed, [accuracy, accuracy])
        authors_ledger(table.name, tmp_path).add(
            theirs.model_copy(update={"setting": "Pat-2", "key": f"theirs {seed}"})
        )
    write_page(tmp_path / "results.md", tmp_path)
    first, second = (tmp_path / "results.md").read_text().split("The authors' own program")
    assert "| Pat-2 | FedFV | 1 | 0.850 (0.853) |" in first
    assert "FedFV, authors' code" not in first
    assert "| Pat-2 | FedFV, authors' code | 2 | 0.820 ± 0.028 (0.853) |" in second


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_published_and_measured_figures_fit_the_terminal_without_truncation(width: int) -> None:
    table = reproduction("fedlf-table1")
    runs = [
        made("FedLF", seed, [0.9, 0.8]).model_copy(update={"setting": "Pat-2"}) for seed in range(2)
    ]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(side_by_side(table, table.lines(runs), width))
    shown = console.export_text()
    assert "…" not in shown
    assert all(column.name in shown for column in table.columns)
    assert "0.850 ± 0.000" in shown
    assert "0.898" in shown


RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "explanation" / "results.md"


@EACH
def test_the_committed_page_is_what_records_and_notes_produce(
    table: Reproduction,
) -> None:
    [committed] = [
        part for part in PAGE.read_text().split("\n## ") if part.startswith(f"{table.title}\n")
    ]
    runs, theirs = complete_runs(table, RESULTS), authors_runs(table.name, RESULTS)
    expected = "\n".join(section_lines(table, runs, theirs, None))
    assert _without_pictures(committed) == _without_pictures(expected.removeprefix("## "))


def _without_pictures(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("![")]


def test_a_claim_lists_the_gains_by_seed_if_the_seeds_disagree() -> None:
    table, claim = reproduction("fedfv-table3"), above("a", "b", "mean")
    runs = [made("a", 0, [0.8]), made("a", 1, [0.8]), made("b", 0, [0.7]), made("b", 1, [0.82])]
    verdict = claim({line.label: line for line in table.lines([_three(run) for run in runs])})
    assert verdict is not None
    assert verdict.holds
    assert "mean +4.00, by seed +10.00 -2.00 (2 seeds)" in verdict.words


def _three(run: Run) -> Run:
    return run.model_copy(update={"accuracy": run.accuracy * 3})


def test_a_difference_is_shown_with_enough_digits() -> None:
    table = reproduction("fedlf-table1")
    for acc, difference in ((0.8564, "acc +0.0204"), (0.9, "acc +0.064")):
        run = made("FedFV", 0, [acc, acc]).model_copy(update={"setting": "Pat-1"})
        assert any(difference in verdict.words for verdict in table.verdicts(table.lines([run])))
