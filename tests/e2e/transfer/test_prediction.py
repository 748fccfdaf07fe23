"""Delta-coded updates between real processes: both sides hold equal bits through all kills.

An update is coded against the client's last one. The clients' updates are the same in every round,
so one twentieth more of it arrives with each. A base that was lost, used twice or confused would
show in the count, and in the model, which adds up all updates.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.client.update.prediction_base import LastUpdate
from fairfleet.common.tensors import Vector
from tests.support.fleet import Fleet

SHIFTS = {
    "a": 1.0,
    "b": 2.5,
}  # exact in bf16, as are the sums of squares: every multiple is 0 or 1
SLOW = {"steps": 3, "step_seconds": 0.03}
SIZE = 2000
SHARE = 0.05  # share of the values in each update


def start(fleet: Fleet, rounds: int, share: float = SHARE, **settings: Any) -> None:
    fleet.start_server(**settings_of(rounds, share, **settings))


def settings_of(rounds: int, share: float, **settings: Any) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "codec": f"topk:{share}",
        "round__quorum": 1.0,
        "lease_seconds": 20,
        **settings,
    }


def kept(share: float = SHARE) -> int:
    return math.ceil(share * (SIZE + 3))


def start_clients(fleet: Fleet) -> None:
    for name, shift in SHIFTS.items():
        fleet.start_client(name, shift=shift, **SLOW)


def bases(fleet: Fleet) -> dict[str, Path]:
    return {file.name.partition("@")[0]: file for file in (fleet.state / "bases").glob("*.npy")}


def client_holds(fleet: Fleet, client: str, rounds: int) -> Vector:
    last = LastUpdate(fleet.client_folder(client))
    (digest,) = fleet.query(
        f"select digest from updates where client = '{client}' and round = {rounds - 1}"
    )[0]
    last.adopt(bytes.fromhex(digest))  # its receipt may not have been final
    base = last.of("federation", fleet.model(rounds).signature, bytes.fromhex(digest))
    assert base is not None
    return np.array(base)


def prove(fleet: Fleet, rounds: int, share: float = SHARE) -> None:
    total = 0.0
    assert set(bases(fleet)) == set(SHIFTS), "one file per client"
    for client, shift in SHIFTS.items():
        server = np.load(bases(fleet)[client])
        np.testing.assert_array_equal(
            server.view(np.uint32), client_holds(fleet, client, rounds).view(np.uint32)
        )
        assert np.count_nonzero(server) == rounds * kept(share)
        assert set(np.unique(server)) == {0.0, np.float32(shift)}
        total -= (
            shift / 2 * kept(share) * rounds * (rounds + 1) / 2
        )  # in round r, r shares of it have arrived
    assert fleet.model(rounds).parameters.sum(dtype=np.float64) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("durability", [pytest.param("update", marks=pytest.mark.slow), "round"])
def test_bases_are_bit_identical_although_server_and_clients_are_killed(
    fleet: Fleet, durability: str
) -> None:
    rounds = 12
    fleet.init(SIZE)
    start(fleet, rounds, durability=durability)
    start_clients(fleet)
    for kill in range(6):
        fleet.wait_for_version(2 * kill)
        time.sleep(0.04 * kill)  # at various points of a round
        if kill % 2:
            fleet.kill_server()
            start(fleet, rounds, durability=durability)
        else:
            fleet.kill_client("b")
            fleet.start_client("b", shift=SHIFTS["b"], **SLOW)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    prove(fleet, rounds)
    assert fleet.query("select count(*) from updates where base is null") == [(2,)], (
        "only the first of each is whole"
    )


@pytest.mark.slow
def test_topsign_is_delta_coded_too_although_both_sides_are_killed(fleet: Fleet) -> None:
    rounds, topsign = 6, {"codec": f"topsign:{SHARE}"}
    fleet.init(SIZE)
    start(fleet, rounds, **topsign)
    start_clients(fleet)
    fleet.wait_for_version(2)
    fleet.kill_client("b")
    fleet.start_client("b", shift=SHIFTS["b"], **SLOW)
    fleet.kill_server()
    start(fleet, rounds, **topsign)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    for client, shift in SHIFTS.items():
        server = np.load(bases(fleet)[client])
        np.testing.assert_array_equal(
            server.view(np.uint32), client_holds(fleet, client, rounds).view(np.uint32)
        )
        np.testing.assert_allclose(
            server, shift, rtol=1e-5
        )  # equal values, so their mean magnitude equals each of them
    assert fleet.query("select count(*) from updates where base is null") == [(2,)], (
        "only the first of each is whole"
    )
    assert fleet.model(rounds).parameters == pytest.approx(
        -rounds * sum(SHIFTS.values()) / 2, rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", "round"])
def test_a_crash_at_any_durable_write_breaks_no_chain_of_bases(
    fleet: Fleet, durability: str
) -> None:
    share = 0.005
    points = (r"fsync of [ab]@\d+@", "fsync of bases", "transaction of a round")
    fleet.init(SIZE)
    start_clients(fleet)
    fleet.die_everywhere(range(1, 36), points, **settings_of(10_000, share, durability=durability))
    rounds = fleet.version() + 3
    start(fleet, rounds, share, durability=durability)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    prove(fleet, rounds, share)
    fleet.stop_server()
    assert fleet.run("server", "--check", "--state-dir", str(fleet.state)).returncode == 0


@pytest.mark.slow
def test_a_server_that_lost_its_bases_gets_full_updates(fleet: Fleet) -> None:
    rounds = 6
    fleet.init(SIZE)
    start(fleet, rounds, durability="round")
    start_clients(fleet)
    fleet.wait_for_version(3)
    fleet.kill_server()
    shutil.rmtree(fleet.state / "bases")
    start(fleet, rounds, durability="round")
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    full_updates = dict(
        fleet.query("select client, count(*) from updates where base is null group by client")
    )
    assert full_updates == {"a": 2, "b": 2}, (
        "the first of each client, and the first after the loss"
    )


@pytest.mark.slow
def test_a_client_that_lost_its_state_starts_with_a_full_update(fleet: Fleet) -> None:
    rounds = 6
    fleet.init(SIZE)
    start(fleet, rounds)
    start_clients(fleet)
    fleet.wait_for_version(3)
    fleet.kill_client("b")
    shutil.rmtree(fleet.client_folder("b"))
    fleet.start_client("b", shift=SHIFTS["b"], **SLOW)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    base = client_holds(fleet, "b", rounds)
    np.testing.assert_array_equal(np.load(bases(fleet)["b"]), base)
    assert 0 < np.count_nonzero(base) < rounds * kept()
    assert fleet.query("select count(*) from updates where base is null and client = 'a'") == [(1,)]


def test_without_the_setting_no_base_is_stored(fleet: Fleet) -> None:
    fleet.init(SIZE)
    start(fleet, 3, compression__prediction=False)
    start_clients(fleet)
    fleet.wait_for_version(3)
    assert set(fleet.wait_clients().values()) == {0}
    assert not (fleet.state / "bases").exists()
    assert fleet.query("select count(*) from updates where base is not null") == [(0,)]
