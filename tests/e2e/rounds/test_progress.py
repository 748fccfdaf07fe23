"""What server and clients in the foreground show of the rounds, and how rounds are numbered."""

from __future__ import annotations

import json

from tests.support.fleet import Fleet


def test_server_and_client_in_the_foreground_show_progress(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, round__evaluate_every=2)
    for shift, name in enumerate("ab", 1):
        fleet.start_client(name, shift=shift)
    fleet.wait_clients()
    server, client = fleet.log("server.log"), fleet.log("a.log")
    assert "round 1 is waiting with 0 updates" in server
    assert "round 1 committed, 2 updates" in server
    assert "version 2 evaluated by 2 of 2 clients" in server
    assert "round 1: update of" in client
    assert "version 2 on this client's test data" in client
    assert "round 1: 2 clients selected" not in server, "text logs show progress only"
    assert fleet.run("rounds", "--server", fleet.address).stdout.count("\n") >= 4
    table = fleet.run("rounds", "--server", fleet.address).stdout.split()
    assert "1" in table
    assert "0" not in table
    numbers = fleet.run("rounds", "--server", fleet.address, "--json").stdout.splitlines()
    assert [json.loads(line)["round"] for line in numbers] == [0, 1]
