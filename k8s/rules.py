"""Write components/monitoring/rules.yaml: deploy/prometheus in the Prometheus operator's form.

python k8s/rules.py      (a test fails while the file is out of date)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SOURCES = [HERE.parent / "deploy" / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
OUTPUT = HERE / "components" / "monitoring" / "rules.yaml"
HEADER = "# Made of deploy/prometheus/ by `python k8s/rules.py`; change it there.\n"


def rule() -> dict[str, Any]:
    groups = [group for source in SOURCES for group in yaml.safe_load(source.read_text())["groups"]]
    metadata = {"name": "fairfleet", "labels": {"app.kubernetes.io/name": "fairfleet"}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": {"groups": groups},
    }


def text() -> str:
    return HEADER + yaml.safe_dump(rule(), sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    OUTPUT.write_text(text())
