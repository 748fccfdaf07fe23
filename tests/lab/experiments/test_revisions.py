"""A rule, dataset or measure that changed its meaning is run again; older records stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairfleet.common.cli.settings import read_model
from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets import registry as datasets
from fairfleet.lab.experiments import revisions
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Ledger
from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.experiments.sweep_runner import (
    RunResources,
    earlier_runs,
    recorded_runs,
    run_sweep,
)
from fairfleet.lab.reproductions.fedfv_table3 import TABLE_3
from fairfleet.lab.reproductions.results_page import complete_runs
from fairfleet.server.rules.registry import BUILT_IN, EarlierReading, Listing
from fairfleet.server.settings import plan_for_rule
from tests.support.samples.sweeps import SMALL, made

MOMENTUM = {"steps": 2, "momentum": 0.9}


def experiment(rule: str = "fedavg", **fields: Any) -> Experiment:
    return Experiment.model_validate(SMALL | {"rule": rule} | fields)


def plain_key(of: Experiment, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the key that this experiment had before there were revisions."""
    with monkeypatch.context() as patched:
        patched.setattr("fairfleet.lab.experiments.experiment.past_readings", lambda *of: {})
        return of.key()


def test_a_revised_rule_has_a_new_key_and_knows_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    revised = experiment("mgda_prox")
    old = plain_key(revised, monkeypatch)
    assert revised.key() != old
    assert revised.earlier_keys() == {"FedMGDA without normalisation, mu 0.01": old}


def test_a_revision_concerns_only_the_experiments_whose_meaning_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for same in (
        experiment("fedavg"),
        experiment("fednova"),
        experiment("fednova,momentum=0.9", plan=MOMENTUM),
    ):
        assert same.key() == plain_key(same, monkeypatch)
        assert same.earlier_keys() == {}
    told = experiment("fednova", plan=MOMENTUM)
    assert told.key() != plain_key(told, monkeypatch)


def test_fedfa_trains_with_momentum_and_is_run_again_unless_it_did_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = experiment("fedfa")
    assert plan_for_rule(now.plan, now.recipe()).momentum == 0.9
    old = plain_key(now, monkeypatch)
    assert now.key() != old
    assert now.earlier_keys() == {"clients train without momentum": old}
    without = experiment("fedfa,client_momentum=0")
    assert plan_for_rule(without.plan, without.recipe()).momentum == 0.0
    assert without.key() == old
    same = experiment("fedfa", plan={"steps": 2, "momentum": 0.9})
    assert same.earlier_keys() == {}


def test_adafedadam_is_run_again_unless_losses_are_divided_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = experiment("adafedadam")
    old = plain_key(now, monkeypatch)
    assert now.key() != old
    words = "losses are divided by those at the first participation"
    assert now.earlier_keys() == {words: old}
    assert experiment("adafedadam,reference=first").key() == old
    for same in (experiment("adafedadam,alpha=0"), experiment("adafedadam,reference=none")):
        assert same.earlier_keys() == {}


def test_a_new_revision_is_run_again_and_the_older_record_stays_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep.model_validate({"base": SMALL, "rules": ["fedavg", "median"], "seeds": [0]})
    planned, ledger = list(sweep.planned()), Ledger(tmp_path / "runs.jsonl")
    first = run_sweep(planned, ledger, RunResources(), None)
    lines = ledger.path.read_bytes()
    was = BUILT_IN["median"]
    reading = EarlierReading("the mean of the two middle values")
    monkeypatch.setitem(BUILT_IN, "median", Listing(was.rule, earlier=(reading,)))
    monkeypatch.setattr(revisions, "listings", lambda: BUILT_IN)
    assert [run.label for run in recorded_runs(planned, ledger)] == ["fedavg"]
    again = run_sweep(planned, ledger, RunResources(), None)
    assert again[0] == first[0]
    assert again[1].key != first[1].key
    assert ledger.path.read_bytes().startswith(lines)
    assert len(ledger.runs()) == 3
    [earlier] = earlier_runs(planned, ledger)
    assert earlier.key == first[1].key
    assert earlier.label == "median, earlier reading: the mean of the two middle values"


@pytest.mark.parametrize(
    ("registry", "name", "subject"),
    [(datasets.EARLIER_READINGS, "digits-rotated", "data"), (revisions.MEASURES, "improved", "m")],
)
def test_datasets_and_measures_have_revisions_too(
    monkeypatch: pytest.MonkeyPatch, registry: dict[str, tuple[str, ...]], name: str, subject: str
) -> None:
    before = experiment().key()
    monkeypatch.setitem(registry, name, ("first reading", "second reading"))
    after = experiment()
    assert after.key() != before
    assert after.earlier_keys()["first reading"] == before
    assert len({after.key(), *after.earlier_keys().values()}) == 3


def test_the_page_of_results_shows_older_records_with_their_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = next(p for p in TABLE_3.sweep.planned() if p.label == "FedAvg")
    old = made("FedAvg", 0, [0.9, 0.8, 0.7]).model_copy(
        update={"experiment": planned.experiment, "key": planned.experiment.key()}
    )
    Ledger(tmp_path / f"{TABLE_3.name}.jsonl").add(old)
    monkeypatch.setitem(datasets.EARLIER_READINGS, "fashion-mnist", ("raw pixels",))
    [shown] = complete_runs(TABLE_3, tmp_path)
    assert shown.label == "FedAvg, earlier reading: raw pixels"
    assert TABLE_3.published_line(shown.setting, shown.label)


def test_a_simulation_with_a_solver_that_the_rule_does_not_cover_is_refused() -> None:
    with pytest.raises(UsageError, match="no formula for the work of solver 'adam'"):
        read_model(Experiment, None, {"rule": "fednova", "plan": {"solver": "adam"}})
    built = experiment("fednova", plan=MOMENTUM).recipe()
    assert built.rule.momentum == 0.9
