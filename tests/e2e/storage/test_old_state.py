"""State directories of earlier versions, from `tests/fixtures/write_state.py`, are usable."""

from __future__ import annotations

import tarfile

import numpy as np

from tests.fixtures.write_state import PARAMETERS, SETTINGS
from tests.support.fleet import Fleet
from tests.support.paths import ROOT

STATES = ROOT / "tests" / "fixtures" / "state"


def unpack(fleet: Fleet, name: str) -> None:
    with tarfile.open(STATES / f"{name}.tar.gz") as archive:
        archive.extractall(fleet.folder, filter="data")
    fleet.size = PARAMETERS


def start_clients(fleet: Fleet, names: str, task: str = "shift") -> None:
    for name in names:
        fleet.start_client(name, task=task, shift=0.25)


def check_finite_model(fleet: Fleet) -> None:
    model = fleet.model(fleet.version())
    assert np.isfinite(model.parameters).all()
    assert np.isfinite(model.buffers).all()


def test_a_round_of_an_earlier_version_is_finished_with_its_stored_updates(
    fleet: Fleet,
) -> None:
    unpack(fleet, "mid_round")
    stored = fleet.query("select client, digest from updates where round = 2 order by client")
    fleet.start_server(**SETTINGS["mid_round"])
    start_clients(fleet, "abc")
    fleet.wait_for_version(5)
    contributions = {contribution["client"] for contribution in fleet.records()[2]["contributions"]}
    assert contributions == {"a", "b", "c"}
    stored_updates = fleet.query(
        "select client, digest from updates "
        "where round = 2 and client in ('a', 'b') order by client"
    )
    assert stored_updates == stored
    check_finite_model(fleet)


def test_float16_history_of_an_earlier_version_stands_in_for_an_absent_client(fleet: Fleet) -> None:
    unpack(fleet, "float16_history")
    assert np.load(fleet.state / "history" / "c@1.npy").dtype == np.float16
    without_c = {"round__minimum_clients": 2, "round__deadline_seconds": 1.5, "round__quorum": 0.6}
    fleet.start_server(
        **(SETTINGS["float16_history"] | without_c)
    )  # the current round has already selected c
    start_clients(fleet, "ab")
    fleet.wait_for_version(5)
    assert "c" in fleet.records()[2]["diagnostics"]["history_coefficients"]
    assert fleet.query("select round from history where client = 'c'") == [(1,)]
    check_finite_model(fleet)


def test_a_state_directory_with_an_update_that_breaks_aggregation_recovers_on_start(
    fleet: Fleet,
) -> None:
    unpack(fleet, "poisoned")
    fleet.start_server(**SETTINGS["poisoned"])
    start_clients(fleet, "ab", task="walk")
    fleet.wait_for_version(4)
    assert fleet.server is not None
    assert fleet.server.poll() is None
    check_finite_model(fleet)
