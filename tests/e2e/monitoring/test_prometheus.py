"""A real Prometheus with the shipped configuration: it scrapes, records and raises alerts.

Its data must answer every query of the dashboard.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.fleet import Fleet, free_port, until
from tests.support.paths import ROOT
from tests.support.scraping import Prometheus, get, series
from tests.support.uneven_clients import expected_fairness, start_uneven_clients

DEPLOY = ROOT / "deploy"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "fairfleet.json").read_text())

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"),
    reason="Debian's package prometheus is not installed: scripts/install-test-packages",
)


def promtool(*words: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *words],
        cwd=CONFIG.parent,
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped_rules(kind: str) -> list[dict[str, Any]]:
    files = [
        yaml.safe_load((CONFIG.parent / name).read_text())
        for name in ("recording.yml", "alerts.yml")
    ]
    return [
        rule
        for file in files
        for group in file["groups"]
        for rule in group["rules"]
        if kind in rule
    ]


@pytest.fixture
def port(fleet: Fleet) -> int:
    """Return the port of a server whose clients have not joined yet."""
    port = free_port()
    fleet.init()
    settings = {
        "round__minimum_clients": 3,
        "round__evaluate_every": 2,
        "rule__name": "fedfv",
        "rule__tau": 5,
    }
    settings["verification__halvings"] = 1
    fleet.start_server(http__port=port, rounds=10, **settings)
    return port


@pytest.fixture
def prometheus(fleet: Fleet, port: int) -> Iterator[Prometheus]:
    """Return a Prometheus that has seen the federation from before its first round to its end."""
    with Prometheus(CONFIG, port, fleet.folder) as prometheus:
        until(lambda: prometheus.query("fairfleet_phase") != {}, "the first scrape")
        start_uneven_clients(fleet)
        fleet.wait_clients()
        until(
            lambda: list(prometheus.query("fairfleet_evaluation_version").values()) == [10.0],
            "the last evaluation",
        )
        yield prometheus


@pytest.mark.slow
def test_it_has_the_stored_values_and_answers_every_query_of_the_dashboard(
    fleet: Fleet, port: int, prometheus: Prometheus
) -> None:
    values = prometheus.query(
        '{__name__=~"fairfleet_(accuracy|loss|improved|strictly|evaluation).*"}'
    )
    assert values == expected_fairness(fleet)
    assert prometheus.query("up") == {series("up"): 1.0}
    assert list(prometheus.query('fairfleet_updates_total{outcome="counted"}').values()) == [30.0]
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    for panel in panels:
        for target in panel["targets"]:
            until(
                lambda query=target["expr"]: prometheus.query(query),
                f"an answer to {target['expr']}",
            )
    for rule in shipped_rules("record"):
        until(lambda name=rule["record"]: prometheus.query(name), f"the recorded {rule['record']}")
    promtool("check", "metrics", text=get(f"http://127.0.0.1:{port}/metrics")[1])


@pytest.mark.slow
def test_prometheus_loads_every_shipped_alert(prometheus: Prometheus) -> None:
    groups = json.loads(get(f"{prometheus.url}/api/v1/rules?type=alert")[1])["data"]["groups"]
    loaded = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert set(loaded) == {rule["alert"] for rule in shipped_rules("alert")}
    assert "err" not in loaded.values()


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")
    tested = (CONFIG.parent / "alerts_test.yml").read_text()
    for rule in shipped_rules("alert"):
        fires = rf"alertname: {rule['alert']}\n\s+exp_alerts:"
        assert re.search(fires, tested), f"nothing makes {rule['alert']} fire"


def test_every_alert_says_what_it_means_and_leads_to_its_section_of_the_docs() -> None:
    page = (DEPLOY.parent / "docs" / "reference" / "alerts.md").read_text()
    for rule in shipped_rules("alert"):
        about, name = rule["annotations"], rule["alert"]
        assert about["runbook_url"].endswith(
            f"docs/reference/alerts.md{{{{ end }}}}#{name.lower()}"
        )
        section = page.partition(f"## {name}\n")[2].partition("## ")[0]
        assert about["description"] in " ".join(section.split())


def test_rules_and_dashboard_use_only_documented_metrics() -> None:
    text = (DEPLOY.parent / "docs" / "reference" / "metrics.md").read_text()
    documented_names = set(re.findall(r"`(fairfleet_\w+)`", text)) | {
        rule["record"] for rule in shipped_rules("record")
    }
    asked = [rule["expr"] for kind in ("record", "alert") for rule in shipped_rules(kind)]
    asked += [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
    ]
    names = {name for query in asked for name in re.findall(r"fairfleet[_:][\w:]+", query)}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in names} <= documented_names
