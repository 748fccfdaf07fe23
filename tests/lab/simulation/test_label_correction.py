"""FedCorr's stages before the rounds, with real training on the digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from torch import nn

from fairfleet.common.training_plan import Plan
from fairfleet.lab.experiments import runner
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.label_noise import LabelCorrection
from fairfleet.lab.simulation.federation import initial_model
from fairfleet.lab.simulation.label_correction import correct_labels
from tests.support.samples.simulated_fleets import CLASSES, FEATURES, federation, fleet

NOISY: dict[str, Any] = {
    "data": "digits",
    "partition": "iid",
    "clients": 8,
    "model": "mlp:32",
    "plan": {"epochs": 5, "batch_size": 10, "learning_rate": 0.1},
    "rounds": 6,
    "label_noise": {"clients": 0.5, "lowest": 0.5},
    "seed": 1,
}
CORRECTED = {**NOISY, "label_correction": {"iterations": 4, "rounds": 10}}


def test_noisy_clients_are_found_and_most_wrong_labels_corrected() -> None:
    experiment = Experiment.model_validate(CORRECTED)
    federation = build_federation(experiment, None, workers=1)
    assert experiment.label_correction is not None
    corrected, report = correct_labels(federation, experiment.label_correction)
    noisy = set(np.flatnonzero(report.wrong))
    assert 2 <= len(noisy) <= 6
    assert noisy <= set(report.noisy)
    assert len(set(report.noisy) - noisy) <= 1  # clean clients that are taken for noisy ones
    assert set(np.flatnonzero(report.estimated)) == set(report.noisy)
    assert np.mean(report.corrected) < 0.35 * np.mean(report.wrong)
    for before, after in zip(federation.clients, corrected.clients, strict=True):
        np.testing.assert_array_equal(before.train_x, after.train_x)
        np.testing.assert_array_equal(before.test_y, after.test_y)
    assert corrected.initial is not None


@pytest.mark.slow
def test_without_rounds_among_clean_clients_labels_are_corrected_by_the_first_stage() -> None:
    federation = build_federation(Experiment.model_validate(NOISY), None, workers=1)
    _, report = correct_labels(federation, LabelCorrection(iterations=4, rounds=0))
    assert np.mean(report.corrected) < np.mean(report.wrong)


def test_the_rule_runs_on_the_corrected_labels_and_the_record_says_what_was_corrected(
    tmp_path: Path,
) -> None:
    rule = {"rule": "adafed,gamma=5"}
    noisy = run(Experiment.model_validate(NOISY | rule), workers=1)
    corrected = run(Experiment.model_validate(CORRECTED | rule), workers=1)
    assert noisy.labels is not None
    assert corrected.labels is not None
    assert noisy.labels.left == noisy.labels.wrong == corrected.labels.wrong
    assert np.mean(corrected.labels.left) < 0.35 * np.mean(noisy.labels.left)
    assert np.mean(corrected.honest) > np.mean(noisy.honest)
    ledger = Ledger(tmp_path / "runs.jsonl")
    ledger.add(corrected)
    assert ledger.runs()[corrected.key].labels == corrected.labels


@pytest.mark.slow
def test_a_resumed_run_with_corrected_labels_ends_with_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment.model_validate(
        CORRECTED | {"label_correction": {"iterations": 1, "rounds": 2}}
    )
    expected = run(experiment, workers=1)
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", -1.0)

    def stop(done: int, planned: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, workers=1, progress=stop, checkpoint=tmp_path / "run.npz")
    resumed = run(experiment, workers=1, checkpoint=tmp_path / "run.npz")
    assert resumed.labels == expected.labels
    assert resumed.losses == expected.losses
    assert resumed.points == expected.points


def test_a_correction_that_diverges_is_recorded_as_a_failure() -> None:
    plan = {"epochs": 5, "batch_size": 10, "learning_rate": 1e20}
    kept: list[Run] = []
    record = run(Experiment.model_validate(CORRECTED | {"plan": plan}), keep=kept.append)
    assert kept == [record]
    assert record.complete
    assert record.rounds == 0
    assert "before the first round" in record.failure
    assert "proximal" in record.failure


def test_label_noise_has_the_seed_of_the_data_and_leaves_test_labels_alone() -> None:
    right = build_federation(Experiment.model_validate(NOISY | {"label_noise": None}), None)
    first, same, other = (
        build_federation(Experiment.model_validate(NOISY | seeds), None)
        for seeds in ({"data_seed": 1}, {"seed": 2, "data_seed": 1}, {"data_seed": 2})
    )
    for a, b, clean in zip(first.clients, same.clients, right.clients, strict=True):
        np.testing.assert_array_equal(a.train_y, b.train_y)
        np.testing.assert_array_equal(a.true_y, clean.train_y)
        np.testing.assert_array_equal(a.test_y, clean.test_y)
    assert any(
        not np.array_equal(a.train_y, b.train_y)
        for a, b in zip(first.clients, other.clients, strict=True)
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"privacy": {"clip": 1.0, "noise_multiplier": 1.0, "where": "client"}}, "privacy"),
        ({"model": "mlp:32+probabilities"}, "logits"),
        ({"behaviour": {"attacks": [{"kind": "label_noise", "strength": 0.5}]}}, "attack"),
        ({"label_correction": {"neighbours": 1}}, "neighbours"),
        ({"label_noise": {"lowest": 1.5}}, "lowest"),
    ],
)
def test_a_correction_that_cannot_work_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Experiment.model_validate(CORRECTED | fields)


def test_the_fields_do_not_change_the_key_of_experiments_without_them() -> None:
    fields = {name: value for name, value in NOISY.items() if name != "label_noise"}
    assert Experiment.model_validate(fields | {"label_noise": None}).key() == (
        Experiment.model_validate(fields).key()
    )
    keys = {Experiment.model_validate(each).key() for each in (fields, NOISY, CORRECTED)}
    assert len(keys) == 3


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def test_a_model_with_running_statistics_keeps_them_from_client_to_client() -> None:
    setup = federation(clients=fleet((30, 40, 30, 40)), model=normalised)
    corrected, report = correct_labels(setup, LabelCorrection(iterations=1, rounds=0))
    assert report.wrong == report.corrected == ()  # The right labels are not known.
    assert len(report.estimated) == 4
    assert corrected.initial is not None
    before = initial_model(normalised, setup.seed)
    assert (corrected.initial.buffers != before.buffers).all()
    batches = sum(setup.plan.steps_for(len(client.train_y)) for client in setup.clients)
    assert corrected.initial.counters.tolist() == [batches]


@pytest.mark.slow
def test_either_engine_corrects_nearly_the_same_labels() -> None:
    experiment = Experiment.model_validate(NOISY)
    settings = LabelCorrection(iterations=1, rounds=2)
    batched, sequential = (
        correct_labels(build_federation(experiment, None, engine, workers=1), settings).federation
        for engine in ("batched", "sequential")
    )
    pairs = zip(batched.clients, sequential.clients, strict=True)
    assert np.mean([np.mean(a.train_y == b.train_y) for a, b in pairs]) > 0.97


def test_a_decaying_learning_rate_decays_only_in_the_rounds() -> None:
    settings = LabelCorrection(iterations=2, rounds=2)
    constant, decaying = (
        correct_labels(federation(plan=plan, workers=1), settings).federation
        for plan in (
            Plan(epochs=1, batch_size=8),
            Plan(epochs=1, batch_size=8, learning_rate_decay=0.5),
        )
    )
    assert constant.initial is not None
    assert decaying.initial is not None
    np.testing.assert_array_equal(constant.initial.parameters, decaying.initial.parameters)
    assert decaying.plan.learning_rate_decay == 0.5
