"""Read the HTTP pages of a server, and run a Prometheus that scrapes it."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fleet import free_port, until

Series = tuple[str, tuple[tuple[str, str], ...]]  # a name, and its labels in order


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Return the status and the body of an HTTP response, also of a refusal."""
    try:
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(port: int) -> dict[Series, float]:
    """Return all metrics of the server at this port."""
    status, text = get(f"http://127.0.0.1:{port}/metrics")
    assert status == HTTPStatus.OK, text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def series(name: str, **labels: str) -> Series:
    """Return the key of a metric with these labels."""
    return name, tuple(sorted(labels.items()))


class PrometheusApi:
    """Queries to a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> dict[Series, float]:
        """Return the current values of an expression."""
        _, text = get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        answer: dict[str, Any] = json.loads(text)
        assert answer["status"] == "success", text
        return {
            _series_of(result["metric"]): float(result["value"][1])
            for result in answer["data"]["result"]
        }


class Prometheus(PrometheusApi):
    """Debian's Prometheus with our configuration, whose target is a server on this machine."""

    def __init__(self, config: Path, target_port: int, folder: Path) -> None:
        settings = yaml.safe_load(config.read_text())
        settings["global"]["scrape_interval"] = settings["global"]["evaluation_interval"] = "1s"
        settings["rule_files"] = [str(config.parent / name) for name in settings["rule_files"]]
        for job in settings["scrape_configs"]:
            job["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(settings))
        super().__init__(f"http://127.0.0.1:{free_port()}")
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def __enter__(self) -> Prometheus:
        until(self._answers, "Prometheus to be ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def _answers(self) -> bool:
        try:
            return get(f"{self.url}/-/ready")[0] == HTTPStatus.OK
        except OSError:
            return False


def _series_of(metric: dict[str, str]) -> Series:
    own = {
        key: value for key, value in metric.items() if key not in ("__name__", "instance", "job")
    }
    return series(metric.get("__name__", ""), **own)
