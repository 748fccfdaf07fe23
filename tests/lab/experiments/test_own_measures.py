"""A simulation is judged by any measure: accuracy, loss, or one that a user's function computes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from fairfleet.common.errors import UsageError
from fairfleet.lab.experiments import runner
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.reports import chart_data, tables
from fairfleet.lab.reports.html_report import page
from fairfleet.lab.reports.result_rows import result_rows
from tests.support.samples.sweeps import SMALL

MEASURES = "tests.support.samples.error_measures:errors"


def judged_by(measure: str, **fields: object) -> Run:
    given = SMALL | {"measure": measure, "measures": MEASURES} | fields
    return run(Experiment.model_validate(given))


def test_a_run_is_judged_by_a_measure_of_which_lower_values_are_better() -> None:
    record, usual = judged_by("error_percent"), run(Experiment.model_validate(SMALL))
    errors, accuracies = np.array(record.measured, float), np.array(usual.accuracy, float)
    np.testing.assert_allclose(errors, 100 * (1 - accuracies), atol=1e-3)
    assert (record.better, record.honest) == ("lower", list(record.measured))
    assert record.fairness.worst_10 == max(record.honest)  # of ten clients, the worst one
    assert abs(record.points[-1].worst_10 - record.fairness.worst_10) < 1e-4
    assert Run.model_validate_json(record.model_dump_json()) == record


def test_a_run_is_judged_by_the_loss_without_a_function() -> None:
    record = run(Experiment.model_validate(SMALL | {"measure": "loss"}))
    assert record.honest == list(record.losses)
    assert record.fairness.worst_10 == max(record.losses)


@pytest.mark.slow
def test_reports_show_the_measure_in_its_own_unit_and_direction() -> None:
    good, bad = judged_by("error_percent"), judged_by("error_percent", rounds=1)
    good, bad = (
        record.model_copy(update={"label": label}) for record, label in ((good, "a"), (bad, "b"))
    )
    assert good.fairness.mean < bad.fairness.mean
    rows = result_rows([good, bad])
    assert abs(rows[0].measures["average"].mean - good.fairness.mean) < 1e-9
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(tables.table(rows, console.width))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    best = next(line for line in shown if line.strip().startswith("a"))
    assert f"\x1b[1m{good.fairness.mean:.2f}" in best  # bold: the lower error
    assert [dot.label for dot in chart_data.pareto_front(chart_data.dots([good, bad]))] == ["a"]
    assert "Average error_percent over the rounds" in page("title", [good, bad])


@pytest.mark.slow
def test_an_interrupted_run_continues_with_its_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment.model_validate(
        SMALL | {"measure": "confidence", "measures": MEASURES, "evaluate_every": 1, "rounds": 2}
    )
    expected = run(experiment)
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", -1.0)

    def stop(done: int, planned: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    checkpoint = tmp_path / "run.npz"
    with pytest.raises(KeyboardInterrupt):
        run(experiment, progress=stop, checkpoint=checkpoint)
    resumed = run(experiment, checkpoint=checkpoint)
    assert (resumed.measured, resumed.points) == (expected.measured, expected.points)


def test_a_measure_that_nothing_computes_is_an_error_with_the_names_that_exist() -> None:
    with pytest.raises(ValidationError, match="measure auc is neither accuracy nor loss"):
        Experiment.model_validate(SMALL | {"measure": "auc"})
    with pytest.raises(UsageError, match=r"no client reports auc.* confidence, error_percent"):
        judged_by("auc")
    with pytest.raises(UsageError, match="has no function 'nothing'"):
        judged_by("auc", measures=MEASURES.replace(":errors", ":nothing"))
