"""What /metrics, /healthz and /readyz of a real server say, and that a real Prometheus understands it."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import pytest

from fairfleet.client.metrics import serve
from fairfleet.client.settings import host_and_port
from fairfleet.client.telemetry import Telemetry
from fairfleet.common.fairness import Fairness
from fairfleet.common.settings import read_settings
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.evaluating import GONE, NO_TEST_DATA
from fairfleet.server.settings import ServerSettings
from tests.e2e.device import Device
from tests.e2e.fleet import Fleet, free_port, until
from tests.e2e.scraping import Series, get, scrape, series

AGENT = "fairfleet_agent_"  # what clients tell of themselves
ROOT = Path(__file__).resolve().parents[2]
CLIENTS = {"ann": ("1", "-3", "0.91"), "bob": ("2", "-30", "0.62"), "cyd": ("3", "-300", "0.805")}
MEASURES = {
    "mean": "mean",
    "standard_deviation": "standard_deviation",
    "worst_5_percent": "worst_5",
    "worst_10_percent": "worst_10",
    "worst_30_percent": "worst_30",
    "best_5_percent": "best_5",
    "best_10_percent": "best_10",
    "min": "min",
    "max": "max",
}
INEQUALITIES = {
    "angle_degrees": "angle_degrees",
    "kl_nats": "kl_to_uniform",
    "gini_ratio": "gini",
    "jain_ratio": "jain",
}


@pytest.fixture
def port() -> int:
    return free_port()


def start_uneven_clients(fleet: Fleet) -> None:
    for name, (shift, target, accuracy) in CLIENTS.items():
        fleet.start_client(name, shift=shift, target=target, accuracy=accuracy)


def evaluated_losses(fleet: Fleet, version: int) -> dict[str, float]:
    rows = fleet.query(f"select client, evaluation from evaluations where version = {version}")
    return {client: json.loads(text)["loss"] for client, text in rows}


def expected_fairness(fleet: Fleet) -> dict[Series, float]:
    """Every fairness gauge, from what is in the store."""
    (newest,), (older,) = fleet.query("select distinct version from evaluations order by version desc limit 2")
    rows = [json.loads(text) for (text,) in fleet.query(f"select evaluation from evaluations where version = {newest}")]
    accuracy = Fairness.of([row["accuracy"] for row in rows])
    loss = Fairness.of([row["loss"] for row in rows], higher_is_better=False)
    before, after = evaluated_losses(fleet, older), evaluated_losses(fleet, newest)
    return {
        **{series("fairfleet_accuracy_ratio", statistic=s): getattr(accuracy, m) for s, m in MEASURES.items()},
        **{series("fairfleet_loss", statistic=s): getattr(loss, m) for s, m in MEASURES.items()},
        **{series(f"fairfleet_accuracy_{name}"): getattr(accuracy, field) for name, field in INEQUALITIES.items()},
        **{series(f"fairfleet_loss_{name}"): getattr(loss, field) for name, field in INEQUALITIES.items()},
        series("fairfleet_improved_clients_ratio"): sum(after[c] < before[c] for c in after) / len(after),
        series("fairfleet_evaluation_version"): newest,
        **{series("fairfleet_evaluation_clients", outcome=o): 0.0 for o in ("failed", "silent", "no_test_data")},
        series("fairfleet_evaluation_clients", outcome="reported"): len(rows),
    }


PRIVATE = {"fairfleet_privacy_epsilon", "fairfleet_privacy_delta"}  # only where noise is added: see test_privacy.py


def families(names: Iterable[str]) -> set[str]:
    """Our metrics, without the suffixes that histograms have."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in names if name.startswith("fairfleet_")}


def documented(whose: str = "") -> set[str]:
    """Every metric of the server, or of a client, that docs/metrics.md has a line for."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = re.findall(r"^\| `(fairfleet_\w+)`", text, re.MULTILINE)
    return {name for name in names if name.startswith(AGENT) == (whose == AGENT)}


def wait_until_measured(port: int, version: int) -> dict[Series, float]:
    """A scrape in which the evaluation of this version is told of."""
    until(lambda: scrape(port).get(series("fairfleet_evaluation_version")) == version, "the evaluation's measures")
    return scrape(port)


def test_the_fairness_gauges_equal_the_values_in_the_store_and_outlive_a_restart(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"http__port": port, "rounds": 6, "round__minimum_clients": 3, "round__evaluate_every": 2}
    fleet.start_server(**settings)
    start_uneven_clients(fleet)
    fleet.wait_for_version(6)
    fleet.wait_clients()
    found = wait_until_measured(port, 6)
    expected = expected_fairness(fleet)
    assert {name: found[name] for name in expected} == expected
    assert 0 < expected[series("fairfleet_improved_clients_ratio")] < 1
    fleet.stop_server()
    fleet.start_server(**settings)
    again = scrape(port)
    assert {name: again[name] for name in expected} == expected
    assert again[series("fairfleet_clients", state="gone")] == 3
    assert again[series("fairfleet_direction_norm")] == found[series("fairfleet_direction_norm")]


def test_a_scrape_tells_how_the_federation_stands_and_what_happened_in_it(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"round__minimum_clients": 3, "round__evaluate_every": 2, "verification__halvings": 1}
    fleet.start_server(http__port=port, rounds=4, rule__name="fedlf", **settings)
    fleet.start_client("ann")
    fleet.start_client("bob")
    until(lambda: scrape(port)[series("fairfleet_clients", state="idle")] == 2, "two idle clients")
    waiting = scrape(port)
    assert waiting[series("fairfleet_phase", phase="waiting")] == 1
    assert waiting[series("fairfleet_model_version")] == waiting[series("fairfleet_round")] == 0
    assert series("fairfleet_accuracy_angle_degrees") not in waiting  # what is not known is not told as 0
    assert waiting[series("fairfleet_commit_timestamp_seconds")] > 0  # of the start: so a stall of round 0 shows
    fleet.start_client("cyd")
    fleet.wait_clients()
    found, status = wait_until_measured(port, 4), fleet.status()
    assert found[series("fairfleet_model_version")] == found[series("fairfleet_rounds_planned")] == status.version == 4
    assert found[series("fairfleet_phase", phase="finished")] == 1
    assert found[series("fairfleet_updates_total", outcome="counted")] == 12
    moved = {
        d: found[series("fairfleet_transferred_bytes_total", direction=d, codec="raw32")] for d in ("received", "sent")
    }
    assert (moved["received"], moved["sent"]) == (status.bytes_received, status.bytes_sent)
    assert found[series("fairfleet_compression_ratio", codec="raw32")] == pytest.approx(1, abs=0.05)
    assert found[series("fairfleet_upload_resumes_total")] == 0
    assert sum(value for (name, _), value in found.items() if name == "fairfleet_steps_total") == 4
    assert found[series("fairfleet_round_duration_seconds_count")] == 4
    for phase, times in {"training": 4, "aggregating": 4, "verifying": 4, "committing": 4, "evaluating": 2}.items():
        assert found[series("fairfleet_phase_duration_seconds_count", phase=phase)] == times
    records = fleet.records()
    training = sum(record["training_seconds"] for record in records)
    assert found[series("fairfleet_phase_duration_seconds_sum", phase="training")] == pytest.approx(training)
    assert found[series("fairfleet_verifications_total", outcome="accepted")] == 4
    assert found[series("fairfleet_step_factor")] == 1
    newest = records[-1]["diagnostics"]
    assert found[series("fairfleet_commit_timestamp_seconds")] == records[-1]["unix_seconds"]
    weights = {each["client"]: each["weight"] for each in records[-1]["contributions"]}
    for client, weight in weights.items():
        assert found[series("fairfleet_client_coefficient", client=client)] == pytest.approx(weight)
    assert found[series("fairfleet_coefficient", statistic="max")] == pytest.approx(max(weights.values()))
    in_layers = [found[series("fairfleet_layer_conflicting_clients", layer=name)] for name in ("weight", "bias")]
    assert in_layers == [len(clients) for clients in newest["layer_conflicts"]]
    assert found[series("fairfleet_conflicting_clients")] == len(newest["conflicts"])
    assert found[series("fairfleet_direction_norm")] == newest["direction_norm"]
    assert found[series("fairfleet_history_rows")] == 3
    assert found[series("fairfleet_history_age_rounds", statistic="max")] == 1
    assert found[series("fairfleet_federation_info", federation="federation", rule="fedlf")] == 1
    assert found[series("fairfleet_client_joins_total")] == 3
    assert families(name for name, _ in found) == documented() - PRIVATE


def test_records_that_cannot_be_measured_do_not_keep_the_server_from_starting(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(rounds=1)
    for name in ("ann", "bob"):
        fleet.start_client(name)
    fleet.wait_clients()
    assert fleet.stop_server() == 0
    fleet.change("update rounds set record = json_remove(record, '$.diagnostics.conflicts')")
    fleet.start_server(http__port=port, rounds=2)
    found = scrape(port)
    assert found[series("fairfleet_model_version")] == 1
    assert series("fairfleet_conflicting_clients") not in found
    assert "cannot measure" in fleet.log("server.log")


def test_no_client_is_named_in_the_metrics_of_a_fleet_larger_than_the_settings_allow(fleet: Fleet, port: int) -> None:
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


def test_updates_are_counted_by_what_became_of_them(device: Device, port: int) -> None:
    chunks, encoded = device.encode()
    diverged = pb.TrainReport(samples=10, loss_before=1.0, loss_after=math.nan, steps=1, learning_rate=0.1)
    with pytest.raises(grpc.RpcError):
        device.open(encoded, size_bytes=1 << 40)
    with pytest.raises(grpc.RpcError, match="loss_after"):
        device.open(encoded, report=diverged)
    device.send(device.open(encoded).upload, chunks)
    assert device.open(encoded).HasField("receipt")
    until(lambda: scrape(port)[series("fairfleet_updates_total", outcome="counted")] == 1, "the update to be counted")
    found = scrape(port)
    assert found[series("fairfleet_updates_total", outcome="refused")] == 2
    assert found[series("fairfleet_updates_total", outcome="repeated")] == 1
    assert found[series("fairfleet_updates_total", outcome="late")] == 0


def test_an_absent_clients_row_that_stands_in_is_told_of(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"rule__name": "fedfv", "rule__tau": 50, "lease_seconds": 1, "round__quorum": 0.5}
    fleet.start_server(http__port=port, rounds=10_000, **settings)
    for name in ("ann", "bob", "cyd"):
        fleet.start_client(name, step_seconds=0.05)
    until(lambda: fleet.query("select 1 from updates where client = 'cyd'"), "an update that can stand for cyd")
    fleet.kill_client("cyd")
    until(lambda: scrape(port)[series("fairfleet_history_stand_ins_total")] >= 3, "a history row to stand in")
    found = scrape(port)
    assert found[series("fairfleet_history_standing_in_rows")] == 1
    assert found[series("fairfleet_history_age_rounds", statistic="max")] >= 3
    assert found[series("fairfleet_history_rows")] == 3
    assert found[series("fairfleet_clients", state="gone")] == 1
    assert found[series("fairfleet_updates_total", outcome="missed")] >= 1
    assert found[series("fairfleet_client_departures_total")] == 1


def test_health_and_readiness_are_pages_of_their_own(fleet: Fleet, port: int) -> None:
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


def test_a_port_of_the_metrics_that_is_in_use_is_told_of(fleet: Fleet, port: int) -> None:
    model = fleet.init()
    fleet.start_server(http__port=port)
    other = ("--listen", "127.0.0.1:0", "--state-dir", str(fleet.folder / "other"), "--model", str(model))
    done = fleet.run("server", *other, "--set", f"http.port={port}")
    assert done.returncode == 2
    assert re.search(rf"127\.0\.0\.1:{port}: Address already in use.*http\.port", done.stderr, re.DOTALL)


@pytest.mark.parametrize(
    ("told", "port"),
    [({}, 8441), ({"listen": "127.0.0.1:0"}, 0), ({"listen": "127.0.0.1:0", "http.port": 9}, 9), ({"http.port": 0}, 0)],
)
def test_the_port_of_the_metrics_is_free_where_the_servers_own_is(told: dict[str, object], port: int) -> None:
    assert read_settings(ServerSettings, None, told).http_port == port


def test_a_port_that_is_no_port_is_a_mistake_in_the_settings(fleet: Fleet) -> None:
    done = fleet.run("server", "--set", "http.port=70000", "--state-dir", str(fleet.state))
    assert done.returncode == 2
    assert "http.port" in done.stderr


def test_a_client_that_is_told_to_serves_its_own_metrics(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(rounds=2, round__evaluate_every=1, round__minimum_clients=1, http__port=free_port())
    os_port = free_port()
    client = fleet.start_client("ann", "--metrics", f"127.0.0.1:{os_port}", step_seconds=0.5)
    found: dict[Series, float] = {}

    def trained() -> bool:
        with contextlib.suppress(OSError):  # it has not begun to listen
            found.update(scrape(os_port))
        return families(name for name, _ in found) == documented(AGENT)

    until(trained, "every metric of a client")
    assert found[series("fairfleet_agent_info", client="ann", device="test")] == 1
    assert found[series("fairfleet_agent_training_loss", when="before")] == 1.0
    assert found[series("fairfleet_agent_accuracy_ratio")] == 0.5
    assert found[series("fairfleet_agent_updates_total", outcome="counted")] >= 1
    assert found[series("fairfleet_agent_transferred_bytes_total", direction="sent")] > 4000
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
def test_where_a_clients_metrics_are_served_is_a_host_and_a_port(told: str, found: tuple[str, int] | None) -> None:
    assert host_and_port(told) == found


def test_a_clients_metrics_are_served_on_ipv6_and_a_port_that_is_none_is_told_of(fleet: Fleet, port: int) -> None:
    url = serve(Telemetry(device="test"), "ann", f"[::1]:{port}")
    assert url == f"http://[::1]:{port}/metrics"
    assert 'client="ann"' in get(url)[1]
    done = fleet.run("client", "--task", "tasks:shift", "--metrics", "127.0.0.1:99999")
    assert done.returncode == 2
    assert "must be host:port" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_gives_no_evaluation_is_recorded_as_such_and_not_as_zero(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"round__minimum_clients": 4, "round__evaluate_every": 1, "lease_seconds": 2}
    fleet.start_server(http__port=port, rounds=1, **settings)
    fleet.start_client("ann", accuracy=0.9)
    fleet.start_client("bob", trouble="blind")
    fleet.start_client("cyd", trouble="dies")
    fleet.start_client("dan", tested=0)
    fleet.wait_clients()
    found = wait_until_measured(port, 1)
    rows = dict(fleet.query("select client, failure from evaluations where evaluation is null"))
    assert set(rows) == {"bob", "cyd", "dan"}
    assert "cannot evaluate" in rows["bob"]
    assert (rows["cyd"], rows["dan"]) == (GONE, NO_TEST_DATA)
    for outcome in ("reported", "failed", "silent", "no_test_data"):
        assert found[series("fairfleet_evaluation_clients", outcome=outcome)] == 1
    assert found[series("fairfleet_accuracy_ratio", statistic="min")] == 0.9


def test_an_evaluation_that_fails_everywhere_is_told_of_and_outlives_a_restart(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"http__port": port, "rounds": 1, "round__evaluate_every": 1}
    fleet.start_server(**settings)
    for name in ("ann", "bob"):
        fleet.start_client(name, trouble="blind")
    fleet.wait_clients()
    for _ in range(2):
        found = wait_until_measured(port, 1)
        assert found[series("fairfleet_evaluation_clients", outcome="failed")] == 2
        assert found[series("fairfleet_evaluation_clients", outcome="reported")] == 0
        assert series("fairfleet_loss", statistic="mean") not in found
        state = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
        assert [(entry["version"], entry["loss"]) for entry in state["evaluations"]] == [(1, None)]
        assert all("cannot evaluate" in row["failure"] for row in state["clients"])
        fleet.stop_server()
        fleet.start_server(**settings)


def test_an_evaluation_that_nobody_has_data_for_is_told_of(fleet: Fleet, port: int) -> None:
    fleet.init()
    fleet.start_server(http__port=port, rounds=1, round__evaluate_every=1)
    for name in ("ann", "bob"):
        fleet.start_client(name, tested=0)
    fleet.wait_clients()
    assert wait_until_measured(port, 1)[series("fairfleet_evaluation_clients", outcome="no_test_data")] == 2


def test_an_evaluation_may_ask_a_sample(fleet: Fleet, port: int) -> None:
    fleet.init()
    settings = {"round__minimum_clients": 3, "round__evaluate_every": 1, "round__evaluation_clients": 2}
    fleet.start_server(http__port=port, rounds=2, **settings)
    start_uneven_clients(fleet)
    fleet.wait_clients()
    counts = fleet.query("select version, count(*) from evaluations where evaluation is not null group by version")
    assert counts == [(1, 2), (2, 2)]
