"""A state directory keeps the blocks in which its rule began to see the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.tensors import Model
from fairfleet.server.federation.kept_blocks import recorded_blocks, with_kept_blocks
from fairfleet.server.rounds.state_machine import Round
from fairfleet.server.rules import recipe
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.published_model import PublishedModel


@pytest.fixture
def store(tmp_path: Path) -> Store:
    model = Model.of({"0.weight": np.zeros(6, np.float32), "0.bias": np.zeros(2, np.float32)})
    made = Store(tmp_path / "state")
    made.create("test", model, PublishedModel.of(0, model).digest)
    return made


def blocks(store: Store, name: str = "fedlf", **parameters: str) -> str:
    return with_kept_blocks(store, recipe(name, **parameters)).rule.blocks()


def begin(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the federation be in its third round."""
    monkeypatch.setattr(store, "current_round", lambda: Round(3))


def test_a_new_federation_uses_modules_and_keeps_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blocks(store) == "modules"
    assert recorded_blocks(store) == "modules"
    begin(store, monkeypatch)
    assert blocks(store) == "modules"


def test_a_federation_from_before_the_choice_keeps_tensors(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, monkeypatch)
    assert blocks(store) == "tensors"
    assert recorded_blocks(store) == "tensors"
    assert with_kept_blocks(store, recipe("fedlf")).rule.layers == "tensors"


def test_a_federation_begun_with_tensors_keeps_them_without_the_setting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blocks(store, layers="tensors") == "tensors"
    begin(store, monkeypatch)
    assert blocks(store) == "tensors"


def test_a_setting_that_is_given_wins_and_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, monkeypatch)
    assert blocks(store, layers="modules") == "modules"
    assert blocks(store) == "modules"


def test_rules_that_do_not_read_layers_record_nothing(store: Store) -> None:
    assert blocks(store, "fedavg") == "tensors"
    assert recorded_blocks(store) is None
