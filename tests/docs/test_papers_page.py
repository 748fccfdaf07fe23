"""docs/explanation/papers.md names only what exists, and every rule, dataset, model and table."""

from __future__ import annotations

import ast
import re

import pytest

from fairfleet.lab.datasets.registry import LOADERS
from fairfleet.lab.experiments.rule_spec import parse_rule
from fairfleet.lab.models import MODELS, model
from fairfleet.lab.partitioning.partitions import Partition
from fairfleet.lab.reproductions import REPRODUCTIONS
from fairfleet.server.rules.optimizers import OPTIMIZERS
from fairfleet.server.rules.registry import BUILT_IN
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "explanation" / "papers.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
KINDS = ("rule", "optimizer", "dataset", "model", "partition", "reproduction", "metric", "test")
SHAPES = {"char-lstm": (80,), "char-lstm-1": (80,)}
# Tables and figures of the papers, with their appendices; of FedLF those of its appendix.
NUMBERED = {
    "FedFV": {"Table": 4, "Figure": 2, "Theorem": 4},
    "AdaFed": {"Table": 19, "Figure": 7},
    "AdaFedAdam": {"Table": 7, "Figure": 6},
    "FedMGDA+": {"Table": 14, "Figure": 9},
    "FedLF": {"Table": 9, "Figure": 5},
}


def named(kind: str) -> set[str]:
    """Return the names of a kind on the page."""
    return set(re.findall(rf"\b{kind} `([^`]+)`", PAGE))


def rows(paper: str) -> list[str]:
    """Return the elements of a paper: the second cells of its rows."""
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| {paper} |")]
    return [line.split(" | ")[1] for line in lines]


def numbers(element: str, kind: str) -> set[int]:
    """Return the numbers after `Table` or `Tables`, as in `Tables 1 and 3 to 5`."""
    found: set[int] = set()
    for text in re.findall(rf"{kind}s?((?:(?:,| and| to)? [0-9]+(?![0-9.]))+)", element):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
            found.update(range(int(first), int(last or first) + 1))
    return found


def test_every_kind_of_name_is_on_the_page() -> None:
    assert all(named(kind) for kind in KINDS)


@pytest.mark.parametrize("text", sorted(named("rule")))
def test_every_rule_and_option_on_the_page_exists(text: str) -> None:
    parse_rule(text)


@pytest.mark.parametrize("name", sorted(named("model")))
def test_every_model_on_the_page_can_be_built(name: str) -> None:
    kind = name.partition(":")[0].partition("+")[0]
    model(name, SHAPES.get(kind, (3, 32, 32)), 10)


@pytest.mark.parametrize("text", sorted(named("partition")))
def test_every_partition_on_the_page_exists(text: str) -> None:
    Partition.parse(text)


def test_every_rule_dataset_model_and_reproduction_is_on_the_page_and_exists() -> None:
    assert {text.split(",")[0] for text in named("rule")} == BUILT_IN.keys()
    assert named("dataset") == LOADERS.keys()
    models = {re.split(r"[:+]", name)[0] for name in named("model")}
    assert models == MODELS.keys()
    assert named("reproduction") == REPRODUCTIONS.keys()
    assert named("optimizer") <= OPTIMIZERS.keys()
    assert {name for name in named("metric") if f"`{name}`" not in METRICS} == set()


@pytest.mark.parametrize("name", sorted(named("test")))
def test_every_test_on_the_page_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_table_and_figure_of_the_papers_has_a_row(paper: str) -> None:
    for kind, last in NUMBERED[paper].items():
        listed = set[int]().union(*(numbers(element, kind) for element in rows(paper)))
        assert set(range(1, last + 1)) - listed == set(), (paper, kind)


def test_a_range_of_numbers_is_understood() -> None:
    assert numbers("Table 2, Tables 17 and 19 to 21: x", "Table") == {2, 17, 19, 20, 21}
    assert numbers("Theorems 5.3 to 5.5", "Theorem") == set()
