"""Compressed updates between real processes: error feedback loses nothing, even through kills."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fairfleet.client.update.error_feedback import StoredResidual
from fairfleet.common.codecs import is_exact, steady_codec
from fairfleet.common.tensors import Vector
from tests.support.fleet import Fleet, until

SHIFTS = {"a": 1.0, "b": 2.5}
FINISHED = {"exit_when_finished": True}


def held_back(fleet: Fleet, client: str, rounds: int) -> Vector:
    """Return the sum of the residuals of the updates that counted, including the last one.

    The receipt of the last one may not have been final.
    """
    stored = StoredResidual(fleet.client_folder(client))
    (digest,) = fleet.query(
        f"select digest from updates where client = '{client}' and round = {rounds - 1}"
    )[0]
    stored.adopt(bytes.fromhex(digest) if isinstance(digest, str) else digest)
    residual = stored.of("federation", fleet.model(rounds).signature, rounds)
    assert residual is not None
    return np.array(residual)


def prove(fleet: Fleet, rounds: int) -> None:
    """Check that the received updates plus the residuals equal what the clients trained."""
    expected = np.zeros(fleet.size + 3)
    residuals = np.zeros(fleet.size + 3)
    for record in fleet.records():
        contributions = {c["client"]: c["weight"] for c in record["contributions"]}
        assert set(contributions) == set(SHIFTS)
        assert set(contributions.values()) == {0.5}
        expected -= sum(SHIFTS.values()) / 2
    for client in SHIFTS:
        residuals += held_back(fleet, client, rounds) / 2
    model = fleet.model(rounds).parameters
    np.testing.assert_allclose(model - residuals, expected, atol=1e-4 * rounds)
    assert np.abs(residuals).max() > 0.05 * rounds, (
        "the codec lost too little for this to be a test"
    )


def start(fleet: Fleet, rounds: int, **settings: Any) -> None:
    always = {"rounds": rounds, "codec": "topk:0.05", "compression__prediction": False}
    always |= {"round__quorum": 1.0, "lease_seconds": 20}
    fleet.start_server(**always, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", pytest.param("round", marks=pytest.mark.slow)])
def test_values_that_topk_omits_arrive_later_although_both_sides_are_killed(
    fleet: Fleet, durability: str
) -> None:
    rounds, slow = 12, {"steps": 3, "step_seconds": 0.03}
    fleet.init(2000)
    start(fleet, rounds, durability=durability)
    for name, shift in SHIFTS.items():
        fleet.start_client(name, shift=shift, **slow)
    for kill in range(6):
        fleet.wait_for_version(2 * kill)
        time.sleep(0.04 * kill)  # at various points of a round
        if kill % 2:
            fleet.kill_server()
            start(fleet, rounds, durability=durability)
        else:
            fleet.kill_client("b")
            fleet.start_client("b", shift=SHIFTS["b"], **slow)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    prove(fleet, rounds)


def test_each_client_gets_its_own_codec(fleet: Fleet) -> None:
    fleet.init(100_000)
    own = {"compression__clients__b": "topk:0.01+zstd", "compression__clients__c": "raw32"}
    fleet.start_server(rounds=2, codec="int8", round__minimum_clients=3, **own, **FINISHED)
    for name in ("a", "b", "c"):
        fleet.start_client(name)
    fleet.wait_clients()
    codecs = set(fleet.query("select client, codec from updates"))
    assert codecs == {("a", "int8"), ("b", "topk:0.01+zstd"), ("c", "raw32")}
    sizes = dict(fleet.query("select client, size_bytes from updates where round = 0"))
    assert sizes["b"] < sizes["a"] / 10 < sizes["c"] / 35


def test_auto_learns_from_the_first_upload(fleet: Fleet) -> None:
    fleet.init(300_000)
    fleet.start_server(rounds=2, codec="auto", round__minimum_clients=1, **FINISHED)
    fleet.start_client("a")
    fleet.wait_clients()
    assert fleet.query("select round, codec from updates order by round") == [
        (0, "int8"),
        (1, "bf16"),
    ]


def test_a_server_with_an_unknown_codec_in_its_settings_does_not_start(fleet: Fleet) -> None:
    model = fleet.init()
    done = fleet.run(
        "server", "--model", str(model), "--state-dir", str(fleet.state), "--codec", "zip"
    )
    assert done.returncode == 2
    assert "unknown codec zip; known here: raw32" in done.stderr
    until(lambda: not fleet.state.exists(), "nothing to be left behind")


def downlink_residual(fleet: Fleet, version: int) -> Vector:
    (file,) = fleet.query(f"select vectors_file from models where version = {version}")[0]
    residual: Vector = load_file(fleet.state / file)["downlink"]
    return residual


def test_clients_follow_a_lossy_downlink_through_kills_of_both_sides(
    fleet: Fleet,
) -> None:
    rounds, size = 10, 200_000
    settings = {
        "rounds": rounds,
        "compression__downlink": "int8",
        "round__quorum": 1.0,
        "lease_seconds": 20,
    }
    fleet.init(size)
    fleet.start_server(**settings)
    for name, shift in SHIFTS.items():
        fleet.start_client(name, shift=shift, steps=2, step_seconds=0.05)
    fleet.wait_for_version(3)
    fleet.kill_client("b")  # starts with the full model
    fleet.start_client("b", shift=SHIFTS["b"], steps=2, step_seconds=0.05)
    fleet.wait_for_version(6)
    sent = fleet.status().bytes_sent
    assert sent < 4.2 * 4 * size + 14 * 1.1 * size, "three full models, the others as changes"
    fleet.kill_server()  # it loses the changes, but not the residual
    fleet.start_server(**settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    expected = -rounds * sum(SHIFTS.values()) / 2
    master = fleet.model(rounds).parameters + downlink_residual(fleet, rounds)
    np.testing.assert_allclose(master, expected, rtol=1e-4)
    assert "do not lead to version" not in fleet.log("a.log") + fleet.log("b.log")


@pytest.mark.slow
@pytest.mark.parametrize(("kept_in", "changes"), [("int8", "raw32"), ("fp16", "int8")])
def test_a_late_client_gets_the_full_model_compressed_and_equal_to_the_others(
    fleet: Fleet, kept_in: str, changes: str
) -> None:
    rounds, size, odd = 8, 200_000, {"a": 0.123456, "b": 0.3}  # not a multiple of the step
    settings: dict[str, Any] = {
        "compression__model": kept_in,
        "compression__downlink": changes,
        "round__quorum": 1.0,
    }
    settings |= {"rounds": rounds, "lease_seconds": 20}
    fleet.init(size)
    fleet.start_server(**settings)
    for name, shift in odd.items():
        fleet.start_client(name, shift=shift, steps=2, step_seconds=0.05)
    fleet.wait_for_version(3)
    fleet.kill_client("b")
    fleet.start_client("b", shift=odd["b"], steps=2, step_seconds=0.05)  # starts with a full model
    fleet.wait_for_version(5)
    most = {"raw32": 14 * 1.1, "int8": 4 * 2.1 + 12 * 1.1}[
        changes
    ]  # full models, or three of them and changes
    assert fleet.status().bytes_sent < most * size
    fleet.kill_server()  # and every client continues from the model on its disk
    fleet.start_server(**settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    assert is_exact(steady_codec(kept_in), fleet.model(rounds).parameters)
    master = fleet.model(rounds).parameters + downlink_residual(fleet, rounds)
    np.testing.assert_allclose(master, -rounds * sum(odd.values()) / 2, rtol=1e-4)
    assert np.abs(downlink_residual(fleet, rounds)).max() > 1e-5, (
        "nothing was rounded, so this tests nothing"
    )
    for log in (fleet.log("a.log"), fleet.log("b.log")):
        assert "do not lead to version" not in log
        assert "is not that model" not in log


@pytest.mark.slow
def test_an_update_that_only_enters_the_history_leaves_the_residual_unchanged(
    fleet: Fleet,
) -> None:
    fleet.init()
    soon = {
        "round__minimum_clients": 3,
        "round__deadline_seconds": 1.5,
        "round__quorum": 0.6,
        "lease_seconds": 60,
    }
    soon |= {"compression__prediction": False}
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, codec="topk:0.05", **soon)
    for name in ("a", "b"):
        fleet.start_client(name, step_seconds=0.3)
    fleet.start_client("slow", shift=2.0, steps=4, step_seconds=0.6)

    def late_rounds() -> set[int]:
        return {
            number for (number,) in fleet.query("select round from history where client = 'slow'")
        }

    first = until(late_rounds, "a late update")
    until(lambda: late_rounds() - first, "another one")
    assert fleet.query("select count(*) from updates where client = 'slow'") == [(0,)]
    folder = fleet.client_folder("slow")
    assert StoredResidual(folder).of("federation", fleet.model(0).signature, 10_000) is None
    row = np.load(next((fleet.state / "history").glob("slow@*.npy")))
    assert set(np.unique(row)) == {0.0, 2.0}, (
        "a residual was added as if the first update had been delivered"
    )
