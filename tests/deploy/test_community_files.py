"""The files for contributors are valid, and run the same commands as CI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT

FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
SCHEMAS = [
    *((form, "github-issue-forms") for form in FORMS),
    (ROOT / ".github/ISSUE_TEMPLATE/config.yml", "github-issue-config"),
    (ROOT / ".github/workflows/ci.yml", "github-workflows"),
]


@pytest.mark.parametrize(("file", "schema"), SCHEMAS, ids=lambda value: Path(value).name)
def test_a_file_for_github_fits_its_schema(file: Path, schema: str) -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [program, "--builtin-schema", f"vendor.{schema}", file]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout


def test_the_workflow_runs_ci_with_a_time_limit() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    (job,) = jobs.values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert job["timeout-minutes"] <= 120


def test_contributing_lists_exactly_the_commands_of_ci() -> None:
    script = (ROOT / ".ci/run").read_text().partition('cd "$(dirname "$0")/.."\n')[2]
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## What CI runs")[2]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    listed = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    assert listed == [line for line in script.splitlines() if not line.startswith("#")]


def test_every_pre_commit_hook_is_local_and_part_of_make_lint() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repositories[0]["hooks"]:
        tool = " ".join(hook["entry"].removeprefix(".venv/bin/").split()[:2]).partition(" -")[0]
        assert f"$(BIN)/{tool}" in lint
