"""The metrics and health pages of a real server, which a real Prometheus must understand."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator

import grpc
import pytest

from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.agent.prometheus import serve
from fairfleet.client.settings import host_and_port
from fairfleet.common.cli.settings import read_settings
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.rounds.missing_evaluations import GONE, NO_TEST_DATA
from fairfleet.server.settings import ServerSettings
from tests.support.device import Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.paths import ROOT
from tests.support.scraping import Series, get, scrape, series
from tests.support.uneven_clients import (
    expected_fairness,
    start_uneven_clients,
)

AGENT = "fairfleet_agent_"  # what clients report about themselves


@pytest.fixture
def port() -> int:
    return free_port()


PRIVATE = {
    "fairfleet_privacy_epsilon",
    "fairfleet_privacy_delta",
}  # only with noise: see test_privacy.py
# Only with measures of the tasks' own (test_measures.py) or the server's own test data.
NAMED = re.compile("fairfleet_(agent_|client_|server_)?measure|fairfleet_server_evaluation")


def families(names: Iterable[str]) -> set[str]:
    """Return our metrics, without the suffixes of histograms."""
    return {
        re.sub("_(bucket|sum|count)$", "", name) for name in names if name.startswith("fairfleet_")
    }


def documented(whose: str = "") -> set[str]:
    """Return every metric of the server or of a client that docs/reference/metrics.md lists."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    names = re.findall(r"^\| `(fairfleet_\w+)`", text, re.MULTILINE)
    names = [name for name in names if not NAMED.match(name)]
    return {name for name in names if name.startswith(AGENT) == (whose == AGENT)}


def wait_until_measured(port: int, version: int) -> dict[Series, float]:
    """Return a scrape that contains the evaluation of this version."""
    until(
        lambda: scrape(port).get(series("fairfleet_evaluation_version")) == version,
        "the evaluation's measures",
    )
    return scrape(port)


def test_fairness_gauges_equal_the_stored_values_and_survive_a_restart(
    fleet: Fleet, port: int
) -> None:
    fleet.init()
    settings = {
        "http__port": port,
        "rounds": 6,
        "round__minimum_clients": 3,
        "round__evaluate_every": 2,
    }
    fleet.start_server(**settings)
    start_uneven_clients(fleet)
    fleet.wait_for_version(6)
    fleet.wait_clients()
    metrics = wait_until_measured(port, 6)
    expected = expected_fairness(fleet)
    assert {name: metrics[name] for name in expected} == expected
    assert 0 < expected[series("fairfleet_improved_clients_ratio")] < 1
    fleet.stop_server()
    fleet.start_server(**settings)
    again = scrape(port)
    assert {name: again[name] for name in expected} == expected
    assert again[series("fairfleet_clients", state="gone")] == 3
    assert again[series("fairfleet_direction_norm")] == metrics[series("fairfleet_direction_norm")]


def test_a_scrape_reports_the_state_and_the_events_of_the_federation(
    fleet: Fleet, port: int
) -> None:
    fleet.init()
    settings = {
        "round__minimum_clients": 3,
        "round__evaluate_every": 2,
        "verification__halvings": 1,
    }
    rule = {"rule__name": "fedlf", "rule__layers": "tensors"}
    fleet.start_server(http__port=port, rounds=4, **rule, **settings)
    fleet.start_client("ann")
    fleet.start_client("bob")
    until(lambda: scrape(port)[series("fairfleet_clients", state="idle")] == 2, "two idle clients")
    waiting = scrape(port)
    assert waiting[series("fairfleet_phase", phase="waiting")] == 1
    assert waiting[series("fairfleet_model_version")] == waiting[series("fairfleet_round")] == 0
    assert (
        series("fairfleet_accuracy_angle_degrees") not in waiting
    )  # an unknown value is not reported as 0
    assert (
        waiting[series("fairfleet_commit_timestamp_seconds")] > 0
    )  # the time of the start, so that a stall of round 0 is visible
    fleet.start_client("cyd")
    fleet.wait_clients()
    metrics, status = wait_until_measured(port, 4), fleet.status()
    assert (
        metrics[series("fairfleet_model_version")]
        == metrics[series("fairfleet_rounds_planned")]
        == status.version
        == 4
    )
    assert metrics[series("fairfleet_phase", phase="finished")] == 1
    assert metrics[series("fairfleet_updates_total", outcome="counted")] == 12
    moved = {
        d: metrics[series("fairfleet_transferred_bytes_total", direction=d, codec="raw32")]
        for d in ("received", "sent")
    }
    assert (moved["received"], moved["sent"]) == (status.bytes_received, status.bytes_sent)
    assert metrics[series("fairfleet_compression_ratio", codec="raw32")] == pytest.approx(
        1, abs=0.05
    )
    assert metrics[series("fairfleet_upload_resumes_total")] == 0
    assert (
        sum(value for (name, _), value in metrics.items() if name == "fairfleet_steps_total") == 4
    )
    assert metrics[series("fairfleet_round_duration_seconds_count")] == 4
    for phase, times in {
        "training": 4,
        "aggregating": 4,
        "verifying": 4,
        "committing": 4,
        "evaluating": 2,
    }.items():
        assert metrics[series("fairfleet_phase_duration_seconds_count", phase=phase)] == times
    records = fleet.records()
    training = sum(record["training_seconds"] for record in records)
    assert metrics[
        series("fairfleet_phase_duration_seconds_sum", phase="training")
    ] == pytest.approx(training)
    assert metrics[series("fairfleet_verifications_total", outcome="accepted")] == 4
    assert metrics[series("fairfleet_step_factor")] == 1
    newest = records[-1]["diagnostics"]
    assert metrics[series("fairfleet_commit_timestamp_seconds")] == records[-1]["unix_seconds"]
    weights = {each["client"]: each["weight"] for each in records[-1]["contributions"]}
    for client, weight in weights.items():
        assert metrics[series("fairfleet_client_coefficient", client=client)] == pytest.approx(
            weight
        )
    assert metrics[series("fairfleet_coefficient", statistic="max")] == pytest.approx(
        max(weights.values())
    )
    in_layers = [
        metrics[series("fairfleet_layer_conflicting_clients", layer=name)]
        for name in ("weight", "bias")
    ]
    assert in_layers == [len(clients) for clients in newest["layer_conflicts"]]
    assert metrics[series("fairfleet_conflicting_clients")] == len(newest["conflicts"])
    assert metrics[series("fairfleet_direction_norm")] == newest["direction_norm"]
    assert metrics[series("fairfleet_history_rows")] == 3
    assert metrics[series("fairfleet_history_age_rounds", statistic="max")] == 1
    assert metrics[series("fairfleet_federation_info", federation="federation", rule="fedlf")] == 1
    assert metrics[series("fairfleet_client_joins_total")] == 3
    assert families(name for name, _ in metrics) == documented() - PRIVATE


def test_records_that_cannot_be_measured_do_not_prevent_a_start(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(rounds=1)
    for name in ("ann", "bob"):
        fleet.start_client(name)
    fleet.wait_clients()
    assert fleet.stop_server() == 0
    fleet.change("update rounds set record = json_remove(record, '$.diagnostics.conflicts')")
    fleet.start_server(http__port=port, rounds=2)
    metrics = scrape(port)
    assert metrics[series("fairfleet_model_version")] == 1
    assert series("fairfleet_conflicting_clients") not in metrics
    assert "cannot measure" in fleet.log("server.log")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["off", "model"])
def test_disabled_figures_are_absent_everywhere_until_enabled_again(
    fleet: Fleet, port: int, level: str
) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=2, diagnostics=level)
    for name in ("ann", "bob"):
        fleet.start_client(name)
    fleet.wait_clients()
    diagnostics = fleet.records()[-1]["diagnostics"]
    assert diagnostics["level"] == level
    assert ("conflicts" in diagnostics, "layer_conflicts" in diagnostics) == (
        level == "model",
        False,
    )
    metrics = scrape(port)
    assert metrics[series("fairfleet_diagnostics_level", level=level)] == 1
    assert metrics[series("fairfleet_diagnostics_level", level="full")] == 0
    assert (series("fairfleet_conflicting_clients") in metrics) == (level == "model")
    assert series("fairfleet_conflicting_layers") not in metrics
    conflicts = json.loads(get(f"http://127.0.0.1:{port}/api/conflicts")[1])
    assert conflicts["diagnostics"] == level
    assert (conflicts["conflicting"] is None) == (level == "off")
    assert len(conflicts["cosines"]) == (2 if level == "model" else 0)
    shown = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
    assert (shown["rounds"][-1]["conflicts"] is None) == (level == "off")
    line = json.loads(
        fleet.run("rounds", "--last", "1", "--json", "--server", fleet.address).stdout
    )
    assert line["diagnostics"] == level
    assert (line["conflicts"] is None) == (level == "off")
    if level == "off":
        assert (
            "not computed" in fleet.run("rounds", "--last", "1", "--server", fleet.address).stdout
        )


def test_metrics_of_a_large_fleet_name_no_client(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=2, round__evaluate_every=1, http__client_series=1)
    fleet.start_client("somebody")
    fleet.start_client("somebody-else")
    fleet.wait_clients()
    assert "somebody" not in get(f"http://127.0.0.1:{port}/metrics")[1]


@pytest.fixture
def device(fleet: Fleet, port: int) -> Iterator[Device]:
    fleet.init()
    fleet.start_server(http__port=port, round__minimum_clients=1, round__quorum=1)
    device = Device(fleet.address, "made-by-hand")
    device.join()
    device.train_task()
    yield device
    device.channel.close()


def test_updates_are_counted_by_outcome(device: Device, port: int) -> None:
    chunks, encoded = device.encode()
    diverged = pb.TrainReport(
        samples=10, loss_before=1.0, loss_after=math.nan, steps=1, learning_rate=0.1
    )
    with pytest.raises(grpc.RpcError):
        device.open(encoded, size_bytes=1 << 40)
    with pytest.raises(grpc.RpcError, match="loss_after"):
        device.open(encoded, report=diverged)
    device.send(device.open(encoded).upload, chunks)
    assert device.open(encoded).HasField("receipt")
    until(
        lambda: scrape(port)[series("fairfleet_updates_total", outcome="counted")] == 1,
        "the update to be counted",
    )
    metrics = scrape(port)
    assert metrics[series("fairfleet_updates_total", outcome="refused")] == 2
    assert metrics[series("fairfleet_updates_total", outcome="repeated")] == 1
    assert metrics[series("fairfleet_updates_total", outcome="late")] == 0


@pytest.mark.slow
def test_rows_that_stand_in_for_absent_clients_are_counted(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"rule__name": "fedfv", "rule__tau": 50, "lease_seconds": 1, "round__quorum": 0.5}
    fleet.start_server(http__port=port, rounds=10_000, **settings)
    for name in ("ann", "bob", "cyd"):
        fleet.start_client(name, step_seconds=0.05)
    until(
        lambda: fleet.query("select 1 from updates where client = 'cyd'"),
        "an update that can stand for cyd",
    )
    fleet.kill_client("cyd")
    until(
        lambda: scrape(port)[series("fairfleet_history_stand_ins_total")] >= 3,
        "a history row to stand in",
    )
    metrics = scrape(port)
    assert metrics[series("fairfleet_history_standing_in_rows")] == 1
    assert metrics[series("fairfleet_history_age_rounds", statistic="max")] >= 3
    assert metrics[series("fairfleet_history_rows")] == 3
    assert metrics[series("fairfleet_clients", state="gone")] == 1
    assert metrics[series("fairfleet_updates_total", outcome="missed")] >= 1
    assert metrics[series("fairfleet_client_departures_total")] == 1


def test_health_and_readiness_have_separate_pages(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(http__port=port)
    url = f"http://127.0.0.1:{port}"
    assert get(f"{url}/healthz") == (200, "healthy\n")
    assert get(f"{url}/readyz") == (200, "ready\n")
    assert get(f"{url}/readyz", "HEAD") == (200, "")
    assert get(f"{url}/readyz", "POST")[0] == 501
    code, said = get(f"{url}/../etc/passwd")
    assert code == 404
    assert "/metrics" in said


def test_a_metrics_port_in_use_is_reported(fleet: Fleet, port: int) -> None:
    model = fleet.init()
    fleet.start_server(http__port=port)
    other = (
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        str(fleet.folder / "other"),
        "--model",
        str(model),
    )
    done = fleet.run("server", *other, "--set", f"http.port={port}")
    assert done.returncode == 2
    assert re.search(
        rf"127\.0\.0\.1:{port}: the port is in use.*http\.port", done.stderr, re.DOTALL
    )


@pytest.mark.parametrize(
    ("told", "port"),
    [
        ({}, 8441),
        ({"listen": "127.0.0.1:0"}, 0),
        ({"listen": "127.0.0.1:0", "http.port": 9}, 9),
        ({"http.port": 0}, 0),
    ],
)
def test_the_metrics_port_is_a_free_one_if_the_server_port_is(
    told: dict[str, object], port: int
) -> None:
    assert read_settings(ServerSettings, None, told).http_port == port


def test_an_invalid_port_is_a_settings_error(fleet: Fleet) -> None:
    done = fleet.run("server", "--set", "http.port=70000", "--state-dir", str(fleet.state))
    assert done.returncode == 2
    assert "http.port" in done.stderr


def test_a_client_serves_its_own_metrics_if_configured(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(
        rounds=2, round__evaluate_every=1, round__minimum_clients=1, http__port=free_port()
    )
    os_port = free_port()
    client = fleet.start_client("ann", "--metrics", f"127.0.0.1:{os_port}", step_seconds=0.5)
    metrics: dict[Series, float] = {}

    def trained() -> bool:
        with contextlib.suppress(OSError):  # it does not listen yet
            metrics.update(scrape(os_port))
        return families(name for name, _ in metrics) == documented(AGENT)

    until(trained, "every metric of a client")
    assert metrics[series("fairfleet_agent_info", client="ann", device="test")] == 1
    assert metrics[series("fairfleet_agent_training_loss", when="before")] == 1.0
    assert metrics[series("fairfleet_agent_accuracy_ratio")] == 0.5
    assert metrics[series("fairfleet_agent_updates_total", outcome="counted")] >= 1
    assert metrics[series("fairfleet_agent_transferred_bytes_total", direction="sent")] > 4000
    assert client.wait(60) == 0


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("127.0.0.1:9441", ("127.0.0.1", 9441)),
        ("[::1]:9441", ("::1", 9441)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("127.0.0.1:99999", None),
        ("9441", None),
        ("[::1:9441", None),
    ],
)
def test_the_address_of_a_clients_metrics_is_a_host_and_a_port(
    told: str, found: tuple[str, int] | None
) -> None:
    assert host_and_port(told) == found


def test_a_clients_metrics_work_on_ipv6_and_an_invalid_port_is_reported(
    fleet: Fleet, port: int
) -> None:
    url = serve(ClientCounters(device="test"), "ann", f"[::1]:{port}")
    assert url == f"http://[::1]:{port}/metrics"
    assert 'client="ann"' in get(url)[1]
    done = fleet.run("client", "--task", "tasks:shift", "--metrics", "127.0.0.1:99999")
    assert done.returncode == 2
    assert "must be host:port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_missing_evaluation_is_recorded_as_missing_and_not_as_zero(
    fleet: Fleet, port: int
) -> None:
    fleet.init()
    settings = {"round__minimum_clients": 4, "round__evaluate_every": 1, "lease_seconds": 2}
    fleet.start_server(http__port=port, rounds=1, **settings)
    fleet.start_client("ann", accuracy=0.9)
    fleet.start_client("bob", trouble="blind")
    fleet.start_client("cyd", trouble="dies")
    fleet.start_client("dan", tested=0)
    fleet.wait_clients()
    metrics = wait_until_measured(port, 1)
    rows = dict(fleet.query("select client, failure from evaluations where evaluation is null"))
    assert set(rows) == {"bob", "cyd", "dan"}
    assert rows["bob"] == "RuntimeError"
    assert (rows["cyd"], rows["dan"]) == (GONE, NO_TEST_DATA)
    for outcome in ("reported", "failed", "silent", "no_test_data"):
        assert metrics[series("fairfleet_evaluation_clients", outcome=outcome)] == 1
    assert metrics[series("fairfleet_accuracy_ratio", statistic="min")] == 0.9


@pytest.mark.slow
def test_an_evaluation_that_fails_everywhere_is_reported_also_after_a_restart(
    fleet: Fleet, port: int
) -> None:
    fleet.init()
    settings = {"http__port": port, "rounds": 1, "round__evaluate_every": 1}
    fleet.start_server(**settings)
    for name in ("ann", "bob"):
        fleet.start_client(name, trouble="blind")
    fleet.wait_clients()
    for _ in range(2):
        metrics = wait_until_measured(port, 1)
        assert metrics[series("fairfleet_evaluation_clients", outcome="failed")] == 2
        assert metrics[series("fairfleet_evaluation_clients", outcome="reported")] == 0
        assert series("fairfleet_loss", statistic="mean") not in metrics
        state = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
        assert [(entry["version"], entry["loss"]) for entry in state["evaluations"]] == [(1, None)]
        assert all(row["failure"] == "RuntimeError" for row in state["clients"])
        fleet.stop_server()
        fleet.start_server(**settings)


def test_an_evaluation_without_any_test_data_is_reported(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=1, round__evaluate_every=1)
    for name in ("ann", "bob"):
        fleet.start_client(name, tested=0)
    fleet.wait_clients()
    assert (
        wait_until_measured(port, 1)[series("fairfleet_evaluation_clients", outcome="no_test_data")]
        == 2
    )


@pytest.mark.slow
def test_an_evaluation_may_select_a_sample_of_clients(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {
        "round__minimum_clients": 3,
        "round__evaluate_every": 1,
        "round__evaluation_clients": 2,
    }
    fleet.start_server(http__port=port, rounds=2, **settings)
    start_uneven_clients(fleet)
    fleet.wait_clients()
    counts = fleet.query(
        "select version, count(*) from evaluations where evaluation is not null group by version"
    )
    assert counts == [(1, 2), (2, 2)]
