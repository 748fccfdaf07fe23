"""Rules by name: checked parameters, helpful errors, and rules of other packages."""

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fairfleet.server.aggregation import aggregate
from fairfleet.server.optimizers import SGD, Adam, CertaintyAdam
from fairfleet.server.rules import Report, Rule, RuleError, listings, optimizer, recipe
from fairfleet.server.rules.adafed import AdaFed
from fairfleet.server.rules.fedlf import FedLF

EXAMPLE = Path(__file__).parent / "example_package"


def installed(folder: Path, entries: dict[str, str]) -> None:
    """Lays the example package out as pip would."""
    shutil.copy(EXAMPLE / "fairfleet_largest_loss.py", folder)
    about = folder / "fairfleet_largest_loss-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fairfleet-largest-loss\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[fairfleet.rules]", *lines]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    listings.cache_clear()
    yield tmp_path
    listings.cache_clear()
    sys.modules.pop("fairfleet_largest_loss", None)


def test_every_listed_rule_can_be_made_and_has_a_line() -> None:
    for name, listing in listings().items():
        made = recipe(name)
        assert isinstance(made.rule, Rule)
        assert listing.line()
        assert "eta" in listing.parameters()


def test_parameters_go_to_the_rule_the_optimizer_or_the_plan() -> None:
    made = recipe("fedadam", weighting="uniform", beta2=0.5, eta=0.1)
    assert made.rule.weighting == "uniform"
    assert isinstance(made.optimizer, Adam)
    assert (made.optimizer.beta2, made.optimizer.eta) == (0.5, 0.1)
    assert recipe("fedprox", mu=0.3).plan == {"mu": 0.3}
    assert recipe("ditto").plan == {"ditto_lambda": 0.1}
    assert recipe("fedfa", gamma=0.9, form="ema").optimizer == SGD(momentum=0.9, form="ema")
    assert recipe("fednova", momentum=0.9).optimizer == SGD()
    assert isinstance(recipe("adafedadam").optimizer, CertaintyAdam)


def test_an_optimizer_of_ones_own_replaces_the_rules() -> None:
    assert recipe("fedlf", optimizer("yogi", eta=0.1)).optimizer.eta == 0.1
    with pytest.raises(RuleError, match="eta of rule 'fedlf' belong to its optimizer"):
        recipe("fedlf", SGD(), eta=0.1)


def test_defaults_are_the_sane_ones_of_adafed_and_fedlf() -> None:
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
        (lambda: recipe("fedavg", weighting="size"), "weighting: Input should be 'samples' or 'uniform'"),
        (lambda: recipe("fedmgda", schedule="fedmgda"), "needs rounds"),
        (lambda: optimizer("adm"), "no optimizer 'adm'; did you mean 'adam'?"),
        (lambda: optimizer("adam", beta=1), "did you mean 'beta"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(call, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        call()
    assert message in str(caught.value)


def test_a_package_adds_a_rule_through_its_entry_point(site: Path) -> None:
    about = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    installed(site, about["project"]["entry-points"]["fairfleet.rules"])
    made = recipe("largest_loss", share=0.5, eta=2.0)
    rows = {"ann": np.array([1.0, 0.0]), "bob": np.array([0.0, 1.0])}
    out = aggregate(np.zeros(2), rows, {"ann": Report(1, 0.1), "bob": Report(1, 3.0)}, made)
    np.testing.assert_array_equal(out.model, [0.0, -2.0])
    with pytest.raises(RuleError, match="did you mean 'share'"):
        recipe("largest_loss", shares=0.5)


def test_a_package_cannot_take_a_name_of_ours(site: Path) -> None:
    installed(site, {"fedavg": "fairfleet_largest_loss:LargestLoss"})
    with pytest.raises(RuleError, match="wants to be rule 'fedavg', which exists"):
        listings()


def test_an_entry_that_is_no_rule_is_refused(site: Path) -> None:
    installed(site, {"odd": "fairfleet_largest_loss:Field"})
    with pytest.raises(RuleError, match="expected a Listing or a subclass of Rule"):
        listings()
