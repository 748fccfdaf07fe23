"""Rules are found by name, with checked parameters, and other packages can add rules."""

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.rules import Report, Rule, RuleError, listings, optimizer, recipe
from fairfleet.server.rules.directions.adafed import AdaFed
from fairfleet.server.rules.directions.fedlf import FedLF
from fairfleet.server.rules.optimizers import SGD, Adam, CertaintyAdam
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "own-rule"


def install_example(folder: Path, entries: dict[str, str]) -> None:
    """Write the example package to the folder as pip would."""
    shutil.copy(EXAMPLE / "fairfleet_largest_loss.py", folder)
    about = folder / "fairfleet_largest_loss-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fairfleet-largest-loss\nVersion: 1.0\n"
    )
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[fairfleet.rules]", *lines]) + "\n")


@pytest.fixture
def site_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder on the import path, with an empty cache of listings."""
    monkeypatch.syspath_prepend(str(tmp_path))
    listings.cache_clear()
    yield tmp_path
    listings.cache_clear()
    sys.modules.pop("fairfleet_largest_loss", None)


def test_every_listed_rule_can_be_built_and_has_a_summary() -> None:
    for name, listing in listings().items():
        built = recipe(name)
        assert isinstance(built.rule, Rule)
        assert listing.line()
        assert "eta" in listing.parameters()


def test_parameters_go_to_the_rule_the_optimizer_or_the_plan() -> None:
    built = recipe("fedadam", weighting="uniform", beta2=0.5, eta=0.1)
    assert built.rule.weighting == "uniform"
    assert isinstance(built.optimizer, Adam)
    assert (built.optimizer.beta2, built.optimizer.eta) == (0.5, 0.1)
    assert recipe("fedprox", mu=0.3).plan == {"mu": 0.3}
    assert recipe("ditto").plan == {"ditto_lambda": 0.1}
    assert recipe("fedfa", gamma=0.9, form="ema").optimizer == SGD(momentum=0.9, form="ema")
    assert recipe("fedprox", mu="0.3").plan == {"mu": 0.3}  # text, as on the command line
    assert recipe("fedfa", client_momentum=0.5).plan == {"client_momentum": 0.5}
    assert recipe("fednova", momentum=0.9).optimizer == SGD()
    assert isinstance(recipe("adafedadam").optimizer, CertaintyAdam)


def test_a_given_optimizer_replaces_the_rules_own() -> None:
    assert recipe("fedlf", optimizer("yogi", eta=0.1)).optimizer.eta == 0.1
    with pytest.raises(RuleError, match="eta of rule 'fedlf' belong to its optimizer"):
        recipe("fedlf", SGD(), eta=0.1)


def test_default_parameters_of_adafed_and_fedlf() -> None:
    assert recipe("adafed").rule == AdaFed(phi_norm="max", length="mean")
    assert recipe("fedlf").rule == FedLF(normalize="all_rows", use_p=True, history=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recipe("adafet"), "no rule 'adafet'; did you mean 'adafed'?"),
        (
            lambda: recipe("fedfv", alfa=1),
            "rule 'fedfv' has no parameter 'alfa'; did you mean 'alpha'? It takes",
        ),
        (lambda: recipe("fedfv", alpha=2), "alpha: Input should be less than or equal to 1"),
        (
            lambda: recipe("fedavg", weighting="size"),
            "weighting: Input should be 'samples' or 'uniform'",
        ),
        (lambda: recipe("fedmgda", schedule="fedmgda"), "needs rounds"),
        (lambda: recipe("fedprox", mu="-1"), "mu: Input should be greater than or equal to 0"),
        (lambda: recipe("fedfa", client_momentum=1), "client_momentum: Input should be less than"),
        (lambda: optimizer("adm"), "no optimizer 'adm'; did you mean 'adam'?"),
        (lambda: optimizer("adam", beta=1), "did you mean 'beta"),
    ],
)
def test_an_error_suggests_the_name_that_was_probably_meant(call, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        call()
    assert message in str(caught.value)


def test_a_package_adds_a_rule_through_its_entry_point(site_folder: Path) -> None:
    about = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    install_example(site_folder, about["project"]["entry-points"]["fairfleet.rules"])
    built = recipe("largest_loss", share=0.5, eta=2.0)
    rows = {"ann": np.array([1.0, 0.0]), "bob": np.array([0.0, 1.0])}
    out = aggregate(np.zeros(2), rows, {"ann": Report(1, 0.1), "bob": Report(1, 3.0)}, built)
    np.testing.assert_array_equal(out.model, [0.0, -2.0])
    with pytest.raises(RuleError, match="did you mean 'share'"):
        recipe("largest_loss", shares=0.5)


def test_a_package_cannot_replace_a_built_in_rule(site_folder: Path) -> None:
    install_example(site_folder, {"fedavg": "fairfleet_largest_loss:LargestLoss"})
    with pytest.raises(RuleError, match="has the name of rule 'fedavg', which exists already"):
        listings()


def test_an_entry_point_that_is_not_a_rule_is_refused(site_folder: Path) -> None:
    install_example(site_folder, {"odd": "fairfleet_largest_loss:Field"})
    with pytest.raises(RuleError, match="expected a Listing or a subclass of Rule"):
        listings()
