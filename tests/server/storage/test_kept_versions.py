"""Which versions of the model a state directory keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.reports import Evaluation, higher
from fairfleet.common.tensors import Model
from fairfleet.server.storage.evaluation_queries import evaluation_write
from fairfleet.server.storage.kept_versions import KeptVersions
from fairfleet.server.storage.model_table import StoredModel, forget_files_write, model_write
from fairfleet.server.storage.queries import writing
from fairfleet.server.storage.schema import rounds
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.published_model import PublishedModel


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state")
    model = Model.of({"weight": np.zeros(3, np.float32)})
    store.create("birds", model, PublishedModel.of(0, model).digest)
    yield store
    store.close()


def opened(store: Store, keep: int) -> KeptVersions:
    versions = KeptVersions(store, keep)
    versions.reload()
    return versions


def commit(store: Store, versions: KeptVersions, version: int) -> list[int]:
    pinned = versions.pinned()
    store.write(
        model_write(StoredModel(version, bytes(32), f"models/{version}")),
        forget_files_write(version - 2, pinned),
    )
    return versions.commit(version, pinned)


def evaluate(store: Store, versions: KeptVersions, version: int, accuracy: float) -> None:
    evaluation = Evaluation(samples=1, loss=1.0, accuracy=accuracy)
    store.write(evaluation_write(version, "a", evaluation, ""))
    versions.evaluated(version, evaluation)


def kept(store: Store) -> list[int]:
    return [model.version for model in store.kept_models()]


def test_the_best_version_stays_until_a_better_one_was_evaluated(store: Store) -> None:
    versions = opened(store, 2)
    commit(store, versions, 1)
    evaluate(store, versions, 1, 0.5)
    for version in (2, 3, 4):
        commit(store, versions, version)
    assert kept(store) == [0, 1, 3, 4]
    evaluate(store, versions, 4, 0.6)
    assert commit(store, versions, 5) == [1, 3]
    assert kept(store) == [0, 4, 5]


def test_a_restart_keeps_the_same_versions(store: Store) -> None:
    versions = opened(store, 2)
    for version in (1, 2, 3):
        commit(store, versions, version)
        evaluate(store, versions, version, 1.0 - version / 10)
    again = opened(store, 2)
    assert (again.best(), again.pinned()) == (1, {0, 1})
    assert again.scores(3) == versions.scores(3)
    assert commit(store, again, 4) == [2]


def test_a_version_that_is_still_being_evaluated_is_not_the_best(store: Store) -> None:
    versions = opened(store, 2)
    for version in (1, 2):
        commit(store, versions, version)
        evaluate(store, versions, version, version / 10)
    assert versions.best(under_evaluation=2) == 1
    assert versions.best() == 2


def test_a_version_whose_file_an_earlier_server_deleted_is_not_the_best(store: Store) -> None:
    versions = opened(store, 2)
    commit(store, versions, 1)
    evaluate(store, versions, 1, 0.9)
    store.write(forget_files_write(1, ()))
    again = opened(store, 2)
    assert again.best() is None
    assert kept(store) == []


def test_fewer_kept_models_release_all_others_at_the_next_commit(store: Store) -> None:
    versions = opened(store, 100)
    for version in range(1, 6):
        store.write(model_write(StoredModel(version, bytes(32), f"models/{version}")))
        assert versions.commit(version, versions.pinned()) == []
    fewer = opened(store, 1)
    assert fewer.commit(6, fewer.pinned()) == [1, 2, 3, 4, 5]


def test_each_version_has_the_reasons_why_it_is_kept(store: Store) -> None:
    versions = opened(store, 2)
    assert versions.reasons(0, newest=0, best=None) == ["newest", "initial"]
    assert versions.reasons(4, newest=5, best=4) == ["best", "recent"]
    assert versions.reasons(2, newest=5, best=2) == ["best"]
    assert versions.reasons(2, newest=5, best=4) == ["expiring"]


def test_a_version_of_an_undone_round_is_not_the_best(store: Store) -> None:
    versions = opened(store, 5)
    for version in (1, 2):
        commit(store, versions, version)
        evaluate(store, versions, version, version / 10)
    undone = {"round": 1, "record": "{}", "undone_by": 2}
    store.write(writing(rounds.insert(), undone))
    assert versions.best() == 2
    versions.reload()
    assert versions.best() == 1


def test_measures_of_which_none_is_chosen_are_named(store: Store) -> None:
    versions = opened(store, 2)
    assert versions.why_no_best() == ""  # nothing was evaluated
    commit(store, versions, 1)
    versions.evaluated(1, Evaluation(samples=1, measures={"auc": higher(0.5), "f1": higher(0.5)}))
    assert versions.why_no_best(under_evaluation=1) == ""
    assert "no accuracy and no loss, but auc, f1." in versions.why_no_best()
    evaluate(store, versions, 1, 0.5)
    assert versions.why_no_best() == ""
