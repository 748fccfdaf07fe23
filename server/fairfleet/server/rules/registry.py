"""Rules by name: what `--rule fedlf` means, with which parameters, server optimizer and plan.

A recipe is a rule, the optimizer that follows it and what it asks of local training. Other packages add their own
through the entry-point group `fairfleet.rules`: each entry is a `Listing`, or a `Rule` to be run with plain SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fairfleet.server.optimizers import OPTIMIZERS, SGD, Adagrad, Adam, CertaintyAdam, Optimizer, Yogi
from fairfleet.server.rules.adafed import AdaFed
from fairfleet.server.rules.adafedadam import AdaFedAdam
from fairfleet.server.rules.averaging import FedAvg, FedAvgN
from fairfleet.server.rules.base import Rule, RuleError
from fairfleet.server.rules.fedfv import FedFV
from fairfleet.server.rules.fedlf import FedLF
from fairfleet.server.rules.fedmdfg import FedMDFG
from fairfleet.server.rules.fedmgda import FedMGDA, FedMGDAPlus
from fairfleet.server.rules.fednova import FedNova
from fairfleet.server.rules.reweighting import AFL, DRFL, TERM, FedFa, FedGini, QFedAvg, TERMSmoothed
from fairfleet.server.rules.robust import Krum, Median, TrimmedMean

Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class Recipe:
    """A rule with its parameters, the optimizer after it, and what local training must do for it."""

    name: str
    rule: Rule
    optimizer: Optimizer = field(default_factory=SGD)
    plan: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """An entry of the registry: the classes behind a name."""

    rule: type[Rule]
    optimizer: type[Optimizer] = SGD
    plan: Mapping[str, Any] = field(default_factory=dict)  # parameters of local training, with defaults
    renamed: Mapping[str, str] = field(default_factory=dict)  # the paper's name -> the optimizer's
    summary: str = ""

    def line(self) -> str:
        return self.summary or self.rule.summary

    def parameters(self) -> dict[str, Any]:
        """Names and defaults; a rule's own parameter hides the optimizer's of the same name."""
        aliases = {ours: paper for paper, ours in self.renamed.items()}
        after = {aliases.get(name, name): value for name, value in _defaults(self.optimizer).items()}
        return {
            **_defaults(self.rule),
            **self.plan,
            **{k: v for k, v in after.items() if k not in _defaults(self.rule)},
        }


BUILT_IN: dict[str, Listing] = {
    "fedavg": Listing(FedAvg),
    "fedavg_n": Listing(FedAvgN),
    "fedprox": Listing(FedAvg, plan={"mu": 0.01}, summary="FedAvg; clients train with a proximal term"),
    "fedmgda": Listing(FedMGDA),
    "mgda_prox": Listing(FedMGDA, plan={"mu": 0.01}, summary="FedMGDA; clients train with a proximal term"),
    "fedmgda_plus": Listing(FedMGDAPlus),
    "fedfv": Listing(FedFV),
    "adafed": Listing(AdaFed),
    "adafedadam": Listing(AdaFedAdam, CertaintyAdam),
    "fedlf": Listing(FedLF),
    "qfedavg": Listing(QFedAvg),
    "afl": Listing(AFL),
    "term": Listing(TERM),
    "term_smoothed": Listing(TERMSmoothed),
    "drfl": Listing(DRFL),
    "fedgini": Listing(FedGini),
    "fedfa": Listing(FedFa, renamed={"gamma": "momentum"}),
    "fednova": Listing(FedNova),
    "fedmdfg": Listing(FedMDFG),
    "ditto": Listing(FedAvg, plan={"ditto_lambda": 0.1}, summary="FedAvg; each client also trains a personal model"),
    "fedadam": Listing(FedAvg, Adam, summary="FedAvg, then Adam on the server"),
    "fedyogi": Listing(FedAvg, Yogi, summary="FedAvg, then Yogi on the server"),
    "fedadagrad": Listing(FedAvg, Adagrad, summary="FedAvg, then Adagrad on the server"),
    "krum": Listing(Krum),
    "trimmed_mean": Listing(TrimmedMean),
    "median": Listing(Median),
}


@cache
def listings() -> dict[str, Listing]:
    """Every rule by name: ours, then those of installed packages, which cannot take a name of ours."""
    found = dict(BUILT_IN)
    for entry in entry_points(group="fairfleet.rules"):
        if entry.name in found:
            raise RuleError(f"{entry.value} wants to be rule {entry.name!r}, which exists; rename its entry point")
        loaded = entry.load()
        if not isinstance(loaded, Listing) and not (isinstance(loaded, type) and issubclass(loaded, Rule)):
            raise RuleError(f"rule {entry.name!r} is {loaded!r}; expected a Listing or a subclass of Rule")
        found[entry.name] = loaded if isinstance(loaded, Listing) else Listing(loaded)
    return found


def recipe(name: str, optimizer: Optimizer | None = None, /, **parameters: Any) -> Recipe:
    """The rule of that name with these parameters; with an optimizer of your own, it replaces the rule's.

    >>> made = recipe("fedadam", weighting="uniform", beta2=0.999)
    >>> made.rule.weighting, made.optimizer.beta2
    ('uniform', 0.999)
    >>> recipe("krum", multy=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fairfleet.server.rules.base.RuleError: rule 'krum' has no parameter 'multy'; did you mean 'multi'? ...
    """
    listing = listings().get(name)
    if listing is None:
        raise RuleError(f"no rule {name!r}{_nearest(name, listings())} `fairfleet rules` lists them all")
    known = listing.parameters()
    if unknown := [key for key in parameters if key not in known]:
        raise RuleError(
            f"rule {name!r} has no parameter {unknown[0]!r}{_nearest(unknown[0], known)} "
            f"It takes: {', '.join(sorted(known))}"
        )
    own = {key: value for key, value in parameters.items() if key in listing.rule.model_fields}
    plan = {key: parameters.get(key, value) for key, value in listing.plan.items()}
    rest = {listing.renamed.get(k, k): v for k, v in parameters.items() if k not in own and k not in plan}
    if optimizer and rest:
        raise RuleError(f"{', '.join(rest)} of rule {name!r} belong to its optimizer, but another one was given")
    return Recipe(name, _build(name, listing.rule, own), optimizer or _build(name, listing.optimizer, rest), plan)


def optimizer(name: str, /, **parameters: Any) -> Optimizer:
    """The server optimizer of that name."""
    kind = OPTIMIZERS.get(name)
    if kind is None:
        raise RuleError(f"no optimizer {name!r}{_nearest(name, OPTIMIZERS)} There are: {', '.join(OPTIMIZERS)}")
    if unknown := [key for key in parameters if key not in kind.model_fields]:
        raise RuleError(f"optimizer {name!r} has no parameter {unknown[0]!r}{_nearest(unknown[0], kind.model_fields)}")
    return _build(name, kind, parameters)


def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: info.get_default() for name, info in kind.model_fields.items()}


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, list(known), 1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def _build(name: str, kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    try:
        return kind(**values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'together'}: {one['msg']}" for one in error.errors())
        raise RuleError(f"rule {name!r} cannot take these values: {wrong}") from error
