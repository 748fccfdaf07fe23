"""The example of an own rule, installed as a package. tests/rules/test_registry.py loads it too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.support import copied, run_python


@pytest.mark.slow
def test_the_installed_rule_serves_the_worst_client_better(tmp_path: Path) -> None:
    example, site = copied("own-rule", tmp_path), tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run_python(example, *install, "--no-index", "--target", str(site), ".")
    words = ("demo", "--rule", "fedavg", "--rule", "largest_loss,share=0.5", "--json")
    done = run_python(
        example,
        *("-m", "fairfleet.common.cli", *words, "--rounds", "50"),
        environment={"PYTHONPATH": str(site)},
    )
    worst = {
        each["rule"]: each["fairness"]["min"] for each in json.loads(done.stdout)["federations"]
    }
    assert worst["largest_loss,share=0.5"] > worst["fedavg"] + 0.1
