"""A state directory keeps the defaults of its rule with which it began."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.tensors import Model
from fairfleet.server.federation.kept_defaults import (
    recorded_blocks,
    with_kept_blocks,
    with_kept_defaults,
)
from fairfleet.server.rounds.state_machine import Round
from fairfleet.server.rules import recipe
from fairfleet.server.rules.weights.adafedadam import AdaFedAdam
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


def reference(store: Store, **parameters: str) -> str:
    rule = with_kept_defaults(store, recipe("adafedadam", **parameters)).rule
    assert isinstance(rule, AdaFedAdam)
    return rule.reference


def test_a_new_federation_takes_losses_on_the_initial_model_and_keeps_to_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reference(store) == "initial"
    begin(store, monkeypatch)
    assert reference(store) == "initial"


def test_a_federation_from_before_the_choice_keeps_the_losses_at_first_participations(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, monkeypatch)
    assert reference(store) == "first"
    assert reference(store) == "first"


def test_a_reference_that_is_given_wins_and_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, monkeypatch)
    assert reference(store, reference="initial") == "initial"
    assert reference(store) == "initial"
    assert reference(store, reference="none") == "none"
