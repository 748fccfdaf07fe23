"""Limits on epsilon between real processes: who reaches one retires, and the others train on."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest

from fairfleet.client.privacy import LedgerEntry, ReleaseLedger
from fairfleet.common.privacy_costs import gaussian_epsilon, update_cost
from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.fleet import Fleet, free_port, until
from tests.support.scraping import get, scrape, series

LOCAL = {"privacy__where": "client", "privacy__clip": 1.0, "privacy__noise_multiplier": 2.0}
PLAIN = "plain"  # this task's model has no buffers


def spent(releases: int) -> float:
    return gaussian_epsilon(releases * update_cost(2.0), 1e-5)


def released_more(fleet: Fleet, known: int) -> bool:
    return releases(fleet, "ann") > known + 2  # evaluations are counted as well


def clients(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Return the records of `fairfleet clients --json`, by client."""
    done = fleet.run("clients", "--server", fleet.address, "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {record["client"]: record for record in records}


def releases(fleet: Fleet, client: str) -> int:
    """Return how many updates of a client the server was sent."""
    rows = fleet.query(f"select count(*) from releases where client = '{client}'")
    return int(rows[0][0])


def on_the_page(port: int, client: str) -> tuple[str, str]:
    """Return a client's state on the page, and why it is not selected."""
    state = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
    row = {row["client"]: row for row in state["clients"]}[client]
    return row["state"], row["not_selected_because"]


def ledger(fleet: Fleet, client: str) -> list[dict[str, Any]]:
    """Return what the client itself recorded of its updates."""
    path = fleet.folder / "clients" / client / "releases.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "update"]


@pytest.mark.slow
def test_a_client_retires_at_its_owners_limit_and_the_others_train_on(fleet: Fleet) -> None:
    limit = ("--max-epsilon", f"{spent(2) + 0.01}")
    fleet.init(task=PLAIN)
    fleet.start_server(rounds=1000, round__evaluate_every=0, **LOCAL)
    for name, flags in (("ann", limit), ("bob", ()), ("cat", ())):
        fleet.start_client(name, *flags, task=PLAIN)
    assert fleet.clients["ann"].wait(30) == 0
    assert f"takes part no more: epsilon {spent(2):.2f} of the" in fleet.log("ann.log")
    fleet.wait_for_version(fleet.version() + 2)
    shown = clients(fleet)
    assert shown["ann"]["state"] == "retired"
    assert "privacy budget is spent" in shown["ann"]["not_selected_because"]
    assert releases(fleet, "ann") == len(ledger(fleet, "ann")) == 2

    assert fleet.start_client("ann", *limit, task=PLAIN).wait(30) == 0
    assert releases(fleet, "ann") == 2, "a restart does not begin a new count"
    fleet.kill_server()
    fleet.start_server(rounds=1000, round__evaluate_every=0, **LOCAL)
    assert clients(fleet)["ann"]["state"] == "retired"

    fleet.start_client("ann", "--max-epsilon", f"{spent(3) + 0.01}", task=PLAIN)
    assert fleet.clients["ann"].wait(30) == 0
    assert releases(fleet, "ann") == len(ledger(fleet, "ann")) == 3
    report = fleet.run("privacy", "--state-dir", str(fleet.folder / "clients"), "--name", "ann")
    assert f"ε {spent(3):.2f} at δ 1e-05" in report.stdout, report
    assert "3 updates" in report.stdout


def test_a_server_that_asks_for_more_than_the_limit_gets_nothing(fleet: Fleet) -> None:
    fleet.init(task=PLAIN)
    little = {**LOCAL, "privacy__noise_multiplier": 0.05}
    fleet.start_server(round__minimum_clients=1, **little)
    fleet.start_client("ann", "--max-epsilon", "5", task=PLAIN)
    assert fleet.clients["ann"].wait(30) == 0
    assert "takes part no more: epsilon 0.00 of the 5" in fleet.log("ann.log")
    assert fleet.query("select count(*) from updates") == [(0,)]
    assert not (fleet.folder / "clients" / "ann" / "releases.jsonl").exists()


@pytest.mark.slow
def test_a_ledger_has_all_that_a_server_was_sent_however_often_the_client_is_killed(
    fleet: Fleet,
) -> None:
    fleet.init(size=200_000, task=PLAIN)
    settings = {"round__minimum_clients": 1, "round__evaluate_every": 1, "privacy__report_noise": 1}
    fleet.start_server(rounds=1000, **settings, privacy__reports="noised", **LOCAL)
    for seconds in (0.0, 0.02, 0.05):  # more often, and it would be taken for two processes
        known = releases(fleet, "ann")
        fleet.start_client("ann", "--max-epsilon", "1e6", task=PLAIN)
        until(functools.partial(released_more, fleet, known), "a release")
        time.sleep(seconds)  # so that it dies in different places
        fleet.kill_client("ann")
    rows = fleet.query("select what from releases where client = 'ann'")
    evaluations = sum(what.startswith("evaluation") for (what,) in rows)
    recorded = ReleaseLedger(fleet.folder / "clients" / "ann")
    (federation,) = recorded.costs
    assert recorded.counts[federation, "update", True] >= len(rows) - evaluations >= 3
    assert recorded.counts[federation, "evaluation", True] >= evaluations > 0


@pytest.mark.slow
def test_a_limit_holds_over_two_federations_at_the_same_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One device takes part in both, with one state directory."""
    fleets = [Fleet(tmp_path_factory.mktemp("fleet")) for _ in range(2)]
    (fleets[0].folder / "clients").mkdir()
    (fleets[1].folder / "clients").symlink_to(fleets[0].folder / "clients")
    try:
        for fleet in fleets:
            fleet.init(task=PLAIN)
            fleet.start_server(rounds=1000, round__minimum_clients=1, **LOCAL)
        limit = ("--max-epsilon", f"{spent(7) + 0.01}")
        for fleet in fleets:
            fleet.start_client("ann", *limit, task=PLAIN, step_seconds=0.05)
        for fleet in fleets:
            assert fleet.clients["ann"].wait(30) == 0
            assert "takes part no more" in fleet.log("ann.log")
        assert sum(releases(fleet, "ann") for fleet in fleets) == len(ledger(fleet, "ann")) == 7
    finally:
        for fleet in fleets:
            fleet.end()


@pytest.mark.slow
def test_a_server_that_is_away_learns_later_that_a_client_retired(fleet: Fleet) -> None:
    fleet.init(task=PLAIN)
    fleet.start_server(rounds=1000, **LOCAL)
    fleet.start_client("bob", task=PLAIN)
    fleet.start_client("ann", "--max-epsilon", "50", task=PLAIN, step_seconds=1)
    until(lambda: fleet.status().received, "bob's update")
    fleet.kill_server()
    other = LedgerEntry("another federation", "update", 0, "aa", 1e6)
    assert ReleaseLedger(fleet.folder / "clients" / "ann").record(other)
    until(lambda: "takes part no more" in fleet.log("ann.log"), "ann to reach her limit")
    fleet.start_server(rounds=1000, **LOCAL)
    assert fleet.clients["ann"].wait(30) == 0
    assert clients(fleet)["ann"]["state"] == "retired"
    until(lambda: "have retired" in fleet.status().held_because, "the reason")


@pytest.mark.slow
def test_a_client_whose_ledger_is_removed_sends_nothing_more(fleet: Fleet) -> None:
    fleet.init(task=PLAIN)
    settings = {"round__minimum_clients": 1, "round__evaluate_every": 0}
    fleet.start_server(rounds=1000, **settings, **LOCAL)
    fleet.start_client("ann", "--max-epsilon", "50", task=PLAIN, step_seconds=0.3)
    until(lambda: releases(fleet, "ann") >= 1, "a release")
    path = fleet.folder / "clients" / "ann" / "releases.jsonl"
    path.rename(path.with_suffix(".away"))
    before = releases(fleet, "ann")
    assert fleet.clients["ann"].wait(30) == 3
    assert "was removed or replaced while this client runs" in fleet.log("ann.log")
    assert releases(fleet, "ann") - before <= 1, "the one that was recorded before, at most"
    assert not path.exists()

    path.with_suffix(".away").write_text("this is no ledger\n")
    path.with_suffix(".away").rename(path)
    count = releases(fleet, "ann")
    assert fleet.start_client("ann", "--max-epsilon", "50", task=PLAIN).wait(30) == 3
    assert "is damaged" in fleet.log("ann.log")
    path.unlink()
    fleet.start_client("ann", "--max-epsilon", "50", task=PLAIN, step_seconds=0.3)
    until(lambda: releases(fleet, "ann") > count, "a release with a new count")
    assert "has no ledger of that" in fleet.log("ann.log")


def test_a_limit_is_refused_for_a_model_that_noise_cannot_protect(fleet: Fleet) -> None:
    """The server is not trusted, so it does not help that servers refuse such models, too."""
    fleet.init()
    fleet.start_server(round__minimum_clients=1)
    for flag in ("--max-epsilon", "--least-noise"):
        assert fleet.start_client("ann", flag, "5").wait(30) == 2
    assert fleet.log("ann.log").count("the model has buffers (norm.running_mean") == 2


def test_a_limit_is_refused_where_updates_have_no_noise(fleet: Fleet) -> None:
    fleet.init(task=PLAIN)
    fleet.start_server(round__minimum_clients=1)
    fleet.start_client("ann", "--max-epsilon", "5", task=PLAIN)
    assert fleet.clients["ann"].wait(30) == 2
    assert "privacy.where: client" in fleet.log("ann.log")
    assert fleet.query("select count(*) from updates") == [(0,)]


@pytest.mark.slow
def test_a_federation_whose_clients_retired_is_held_and_says_why(fleet: Fleet) -> None:
    limit, port = ("--max-epsilon", f"{spent(1) + 0.01}"), free_port()
    settings = {"rounds": 1000, "round__minimum_clients": 2, "http__port": port, **LOCAL}
    fleet.init(task=PLAIN)
    fleet.start_server(**settings)
    events = fleet.watch()
    fleet.operator().Pause(pb.PauseRequest(), timeout=10)  # the first round has all three
    for name, flags in (("ann", limit), ("bob", limit), ("cat", ())):
        fleet.start_client(name, *flags, task=PLAIN)
    until(lambda: fleet.status().connected == 3, "all clients to join")
    fleet.operator().Resume(pb.ResumeRequest(), timeout=10)
    assert [fleet.clients[name].wait(30) for name in ("ann", "bob")] == [0, 0]
    why = "2 of 3 clients have retired, by their owners' limits on epsilon; 1 can still train"
    until(lambda: why in fleet.status().held_because, "the federation to be held")
    assert f"no round begins: {why}" in fleet.log("server.log")
    until(
        lambda: any(why in event.federation_paused.reason for event in events), "watchers to see it"
    )
    gone = [event.client_gone for event in events if event.HasField("client_gone")]
    assert {change.client for change in gone if change.retired} == {"ann", "bob"}
    assert why in " ".join(fleet.run("status", "--server", fleet.address).stdout.split())
    assert fleet.run("resume", "--server", fleet.address).returncode != 0
    metrics = scrape(port)
    assert metrics[series("fairfleet_clients", state="retired")] == 2
    assert metrics[series("fairfleet_clients", state="gone")] == 0
    assert on_the_page(port, "ann") == (
        "retired",
        "its privacy budget is spent, by its owner's limit",
    )

    fleet.kill_server()
    fleet.start_server(**settings)
    until(lambda: why in fleet.status().held_because, "a restarted server to be held")
    assert scrape(port)[series("fairfleet_clients", state="retired")] == 2
    assert on_the_page(port, "bob")[0] == "retired"

    begun = fleet.log("server.log").count("rounds can begin again")
    assert fleet.start_client("bob", *limit, task=PLAIN).wait(30) == 0
    assert fleet.log("server.log").count("rounds can begin again") == begun, "bob does not train"
    version = fleet.version()
    fleet.start_client("ann", task=PLAIN)  # its owner gives up the limit
    fleet.wait_for_version(version + 2)
    assert fleet.status().held_because == ""
    assert "rounds can begin again" in fleet.log("server.log")


@pytest.mark.slow
def test_a_client_that_retires_in_mid_round_does_not_leave_the_others_waiting_forever(
    fleet: Fleet,
) -> None:
    """Its budget goes while it trains: another federation uses the same data, and the ledger."""
    fleet.init(task=PLAIN)
    settings = {"round__minimum_clients": 2, "round__longest_wait_seconds": 2}
    fleet.start_server(rounds=1000, round__deadline_seconds=1, **settings, **LOCAL)
    fleet.start_client("ann", task=PLAIN)
    fleet.start_client("bob", "--max-epsilon", "50", task=PLAIN, step_seconds=1)
    until(lambda: fleet.status().received, "ann's update")
    other = LedgerEntry("another federation", "update", 0, "aa", 1e6)
    assert ReleaseLedger(fleet.folder / "clients" / "bob").record(other)
    assert fleet.clients["bob"].wait(30) == 0
    assert releases(fleet, "bob") == 0, "its update was not even announced"
    why = "1 of 2 clients have retired, by their owners' limits on epsilon"
    until(lambda: why in fleet.log("server.log"), "the reason")
    assert fleet.clients["ann"].wait(30) == 0
    assert "1 of at least 2 are connected; gave up" in fleet.status().finished_reason
    assert fleet.version() == 1, "the update that was there counts"


@pytest.mark.slow
def test_exhausted_clients_retire_one_by_one_on_the_server(fleet: Fleet) -> None:
    settings = {**LOCAL, "privacy__max_epsilon": spent(4) + 0.01, "round__minimum_clients": 1}
    settings |= {"rounds": 1000, "round__evaluate_every": 0}
    fleet.init(task=PLAIN)
    fleet.start_server(**settings)
    fleet.start_client("ann", task=PLAIN, step_seconds=0.2)
    fleet.wait_for_version(1)
    fleet.operator().Pause(pb.PauseRequest(), timeout=10)
    fleet.start_client("bob", task=PLAIN, step_seconds=0.2)
    until(lambda: "bob" in clients(fleet), "bob to join")
    fleet.operator().Resume(pb.ResumeRequest(), timeout=10)
    until(lambda: clients(fleet)["ann"]["state"] == "retired", "ann to retire")
    fleet.kill_server()
    fleet.start_server(**settings)
    until(lambda: "bob" in clients(fleet) and releases(fleet, "bob") > 2, "bob to train on")
    ann = clients(fleet)["ann"]
    assert ann["state"] == "retired"
    assert set(fleet.wait_clients().values()) == {0}
    assert releases(fleet, "ann") == releases(fleet, "bob") == 4
    assert "2 of 2 clients have spent their privacy budget" in fleet.log("server.log")
    assert fleet.selections()[-1] == {"bob"}
    shown = clients(fleet)
    assert {record["state"] for record in shown.values()} == {"retired"}
    assert all(record["epsilon"] <= spent(4) + 1e-9 for record in shown.values())
