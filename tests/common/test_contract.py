"""The wire protocol stays compatible: a newer server does not break a device in the field."""

from __future__ import annotations

import copy
import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract", ROOT / "proto" / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def promised() -> dict[str, Any]:
    promised: dict[str, Any] = json.loads((ROOT / "proto" / "contract.json").read_text())
    return promised


def test_the_proto_files_keep_every_promise_and_every_addition_is_recorded(
    contract: ModuleType, promised: dict[str, Any]
) -> None:
    now, reserved = contract.current()
    assert contract.broken(promised, now, reserved) == []
    assert now == promised, (
        "something was added: run `python proto/contract.py --extend` and commit contract.json"
    )


def test_every_breaking_change_is_found(contract: ModuleType, promised: dict[str, Any]) -> None:
    chunk, fleet, outcome = "fairfleet.v1.Chunk", "fairfleet.v1.Fleet", "fairfleet.v1.Outcome"

    renamed, retyped, gone, no_call, other_value = (copy.deepcopy(promised) for _ in range(5))
    number = next(iter(promised[chunk]))
    renamed[chunk][number][0] = "another"
    retyped[chunk][number][1] = "TYPE_STRING"
    del gone[chunk][number]
    del no_call[fleet]["Join"]
    other_value[outcome]["1"] = "OUTCOME_IGNORED"
    for now in (renamed, retyped, gone, no_call, other_value):
        assert len(contract.broken(promised, now, {})) == 1
    without = copy.deepcopy(promised)
    del without[chunk]
    assert contract.broken(promised, without, {}) == [f"{chunk} is gone"]
    assert (
        contract.broken(promised, gone, {chunk: {number, promised[chunk][number][0]}}) == []
    )  # A reserved field may be removed.
    added = copy.deepcopy(promised)
    added[chunk]["99"] = ["extra", "TYPE_BYTES", "", False]
    assert contract.broken(promised, added, {}) == []
