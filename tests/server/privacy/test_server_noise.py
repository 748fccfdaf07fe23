"""The noise that the server adds, and how far one client can move the mean."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.privacy import SeededNoise, norm
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.federation.model_committer import CommitterOptions, ModelCommitter
from fairfleet.server.federation.staged_model import StagedModel
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.storage.store import Store, StoredUpdate
from fairfleet.server.transfer.published_model import PublishedModel
from tests.support.samples.privacy import UNIFORM


def committed_model(
    folder: Path, rows: dict[str, np.ndarray], privacy: PrivacySettings, cohort: int
) -> StagedModel:
    """Return the model that the server computes from these updates."""
    store, model = (
        Store(folder),
        Model.of({"weight": np.zeros(len(next(iter(rows.values()))), np.float32)}),
    )
    store.create("test", model, PublishedModel.of(0, model).digest)
    options = CommitterOptions(noise=privacy.server_noise(cohort, SeededNoise(1)))
    committer = ModelCommitter.open(store, 0, UNIFORM, options)
    updates = {}
    for client, values in rows.items():
        report = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=0.1)
        row = Model.empty(model.signature)
        row.parameters[:] = values
        updates[client] = (StoredUpdate(0, client, bytes(32), "raw32", 1, report, None), row)
        committer.add(client, row, rows)
    with ThreadPoolExecutor(1) as workers:
        committed = committer.aggregate(updates, workers)
    store.close()
    assert isinstance(committed, StagedModel)
    return committed


def test_one_client_moves_the_models_mean_by_no_more_than_twice_the_bound_over_the_cohort(
    tmp_path: Path,
) -> None:
    """With the same noise and one update replaced, the difference is the sensitivity."""
    others = {"bob": np.full(50, 0.01), "cem": np.full(50, -3.0)}
    privacy = PrivacySettings(where="server", clip=0.5, noise_multiplier=1.0)
    models = [
        committed_model(
            tmp_path / str(index), {"ann": np.full(50, value), **others}, privacy, cohort=4
        ).model.parameters
        for index, value in enumerate((1e6, -1e6, 0.0))
    ]
    for first, second in itertools.combinations(models, 2):
        assert norm(first - second) <= 2 * 0.5 / 4 * (1 + 1e-5)
    # The bound is reached.
    assert norm(models[0] - models[1]) == pytest.approx(2 * 0.5 / 4, rel=1e-4)


def test_the_mean_has_the_stated_noise_and_a_fixed_divisor(
    tmp_path: Path,
) -> None:
    privacy = PrivacySettings(where="server", clip=2.0, noise_multiplier=3.0)
    for index, clients in enumerate((1, 3)):
        rows = {f"client-{number}": np.full(40_000, 1.0) for number in range(clients)}
        model = committed_model(tmp_path / str(index), rows, privacy, cohort=5).model.parameters
        assert float(np.std(model)) == pytest.approx(3.0 * 2.0 / 5, rel=0.03)
        assert float(np.mean(model)) == pytest.approx(-clients * 2.0 / 200 / 5, abs=5 * 1.2 / 200)
