"""Rules by name: the classes, parameters, server optimizer and training plan behind a name.

A recipe is a rule, the optimizer that follows it and its requirements on local training. Other
packages add rules through the entry-point group `fairfleet.rules`. Each entry is a `Listing`, or a
`Rule`, which is then run with plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from fairfleet.common.training_plan import Plan
from fairfleet.server.rules.base import Rule
from fairfleet.server.rules.directions.adafed import AdaFed
from fairfleet.server.rules.directions.fairgrad import FairGrad
from fairfleet.server.rules.directions.fedfv import FedFV
from fairfleet.server.rules.directions.fedlf import FedLF
from fairfleet.server.rules.directions.fedmdfg import FedMDFG
from fairfleet.server.rules.directions.fedmgda import FedMGDA, FedMGDAPlus
from fairfleet.server.rules.errors import RuleError
from fairfleet.server.rules.optimizers import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AMSGrad,
    CertaintyAdam,
    Optimizer,
    Yogi,
)
from fairfleet.server.rules.robust import Krum, Median, TrimmedMean
from fairfleet.server.rules.weights.adafedadam import AdaFedAdam
from fairfleet.server.rules.weights.averaging import FedAvg, FedAvgN
from fairfleet.server.rules.weights.fedeba import FedEBA
from fairfleet.server.rules.weights.fedga import FedGA
from fairfleet.server.rules.weights.fednova import FedNova
from fairfleet.server.rules.weights.propfair import PropFair
from fairfleet.server.rules.weights.reweighting import (
    AFL,
    DRFL,
    TERM,
    FedFa,
    FedGini,
    QFedAvg,
    TERMSmoothed,
)
from fairfleet.server.rules.weights.spread import GIFAIR, SemiVRed
from fairfleet.server.rules.weights.superquantile import Superquantile

Kind = TypeVar("Kind", bound=BaseModel)

# Parameters of local training, as rules name them -> the plan's fields.
PLAN_FIELDS = {
    "mu": "proximal_mu",
    "ditto_lambda": "personal_lambda",
    "client_momentum": "momentum",
}


@dataclass(frozen=True)
class Recipe:
    """A rule with its parameters, the optimizer after it, and the parameters of local training."""

    name: str
    rule: Rule
    optimizer: Optimizer = field(default_factory=SGD)
    plan: Mapping[str, Any] = field(default_factory=dict)  # parameters of local training

    def for_plan(self, plan: Plan) -> Recipe:
        """Return the recipe for clients that train by this plan.

        Raises RuleError if the rule's formula does not cover the plan's solver.
        """
        return replace(self, rule=self.rule.for_plan(plan))


def _always(recipe: Recipe, plan: Plan) -> bool:
    return True


class EarlierReading(NamedTuple):
    """What a rule's name meant before a revision."""

    words: str  # for the label of results with it
    # Whether the revision changed what this recipe, with this plan of local training, means.
    concerns: Callable[[Recipe, Plan], bool] = _always
    written: str = ""  # the parameter, such as "layers=tensors", by which it can still be had


@dataclass(frozen=True)
class Listing:
    """An entry of the registry: the classes behind a name."""

    rule: type[Rule]
    optimizer: type[Optimizer] = SGD
    plan: Mapping[str, Any] = field(default_factory=dict)  # of local training, with defaults
    # Parameters that the paper names differently: the paper's name -> the optimizer's name.
    renamed: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""  # replaces the rule's own summary
    # What the name meant before, oldest first. The present revision is one more than their number.
    earlier: tuple[EarlierReading, ...] = ()

    def line(self) -> str:
        """Return the one-line summary."""
        return self.summary or self.rule.summary

    def parameters(self) -> dict[str, Any]:
        """Return the names and defaults of all parameters: the rule's, the plan's, the optimizer's.

        A parameter of the rule hides the optimizer's of the same name.
        """
        aliases = {name: alias for alias, name in self.renamed.items()}
        after = {
            aliases.get(name, name): value for name, value in _defaults(self.optimizer).items()
        }
        return {
            **_defaults(self.rule),
            **self.plan,
            **{k: v for k, v in after.items() if k not in _defaults(self.rule)},
        }


def fednova_was_untold(recipe: Recipe, plan: Plan) -> bool:
    """Return whether FedNova would take the clients' solver from the plan."""
    rule = recipe.rule
    if not isinstance(rule, FedNova):
        return False
    by_momentum = plan.momentum and rule.momentum is None
    by_proximal_term = plan.proximal_mu and rule.lr_mu is None and rule.proximal_mu is None
    return bool(by_momentum or by_proximal_term)


def fedlf_had_tensors(recipe: Recipe, plan: Plan) -> bool:
    """Return whether the layers of FedLF, which are modules by default, were not given."""
    return "layers" not in recipe.rule.model_fields_set


def fedfa_had_no_client_momentum(recipe: Recipe, plan: Plan) -> bool:
    """Return whether clients train with another momentum than that of the plan alone."""
    return bool(recipe.plan["client_momentum"] != plan.momentum)


def adafedadam_used_first_losses(recipe: Recipe, plan: Plan) -> bool:
    """Return whether AdaFedAdam takes the loss on the initial model by default."""
    return recipe.rule.needs().initial_loss and "reference" not in recipe.rule.model_fields_set


BUILT_IN: dict[str, Listing] = {
    "fedavg": Listing(FedAvg),
    "fedavg_n": Listing(FedAvgN),
    "fedprox": Listing(
        FedAvg, plan={"mu": 0.01}, summary="FedAvg; clients train with a proximal term"
    ),
    "fedmgda": Listing(FedMGDA),
    "mgda_prox": Listing(
        FedMGDAPlus,
        plan={"mu": 0.1},
        summary="FedMGDA+; clients train with a proximal term",
        earlier=(EarlierReading("FedMGDA without normalisation, mu 0.01"),),
    ),
    "fedmgda_plus": Listing(FedMGDAPlus),
    "fedfv": Listing(FedFV),
    "adafed": Listing(AdaFed),
    "adafedadam": Listing(
        AdaFedAdam,
        CertaintyAdam,
        earlier=(
            EarlierReading(
                "losses are divided by those at the first participation",
                adafedadam_used_first_losses,
                "reference=first",
            ),
        ),
    ),
    "fedlf": Listing(
        FedLF,
        earlier=(EarlierReading("layers are tensors", fedlf_had_tensors, "layers=tensors"),),
    ),
    "qfedavg": Listing(QFedAvg),
    "afl": Listing(AFL),
    "term": Listing(TERM),
    "term_smoothed": Listing(TERMSmoothed),
    "drfl": Listing(DRFL),
    "fedgini": Listing(FedGini),
    "fedfa": Listing(
        FedFa,
        plan={"client_momentum": 0.9},
        renamed={"gamma": "momentum"},
        earlier=(
            EarlierReading(
                "clients train without momentum",
                fedfa_had_no_client_momentum,
                "client_momentum=0",
            ),
        ),
    ),
    "fednova": Listing(
        FedNova, earlier=(EarlierReading("not told of the plan's solver", fednova_was_untold),)
    ),
    "fedmdfg": Listing(FedMDFG),
    "ditto": Listing(
        FedAvg,
        plan={"ditto_lambda": 0.1},
        summary="FedAvg; each client also trains a personal model",
    ),
    "fedadam": Listing(FedAvg, Adam, summary="FedAvg, then Adam on the server"),
    "fedyogi": Listing(FedAvg, Yogi, summary="FedAvg, then Yogi on the server"),
    "fedadagrad": Listing(FedAvg, Adagrad, summary="FedAvg, then Adagrad on the server"),
    "fedamsgrad": Listing(FedAvg, AMSGrad, summary="FedAvg, then AMSGrad on the server"),
    "fairgrad": Listing(FairGrad),
    "gifair": Listing(GIFAIR),
    "semi_vred": Listing(SemiVRed),
    "superquantile": Listing(Superquantile),
    "fedeba": Listing(FedEBA),
    "fedga": Listing(FedGA),
    "propfair": Listing(PropFair),
    "krum": Listing(Krum),
    "trimmed_mean": Listing(TrimmedMean),
    "median": Listing(Median),
}


@cache
def listings() -> dict[str, Listing]:
    """Return every rule by name: the built-in rules, then those of installed packages.

    Raises RuleError for an entry point that has the name of another rule or is not a rule.
    """
    by_name = dict(BUILT_IN)
    for entry in entry_points(group="fairfleet.rules"):
        if entry.name in by_name:
            raise RuleError(
                f"{entry.value} has the name of rule {entry.name!r}, which exists already; "
                "rename its entry point"
            )
        loaded = entry.load()
        if not isinstance(loaded, Listing) and not (
            isinstance(loaded, type) and issubclass(loaded, Rule)
        ):
            raise RuleError(
                f"rule {entry.name!r} is {loaded!r}; expected a Listing or a subclass of Rule"
            )
        by_name[entry.name] = loaded if isinstance(loaded, Listing) else Listing(loaded)
    return by_name


def recipe(name: str, optimizer: Optimizer | None = None, /, **parameters: Any) -> Recipe:
    """Return the rule of that name with these parameters; others have their defaults.

    Parameters belong to the rule, to local training or to the rule's server optimizer. An
    `optimizer` replaces the rule's own. Raises RuleError for an unknown name or parameter, and for
    a value out of range.

    >>> fedadam = recipe("fedadam", weighting="uniform", beta2=0.999)
    >>> fedadam.rule.weighting, fedadam.optimizer.beta2
    ('uniform', 0.999)
    >>> recipe("krum", multy=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fairfleet.server.rules.errors.RuleError: rule 'krum' has no parameter 'multy'; did you mean ...
    """
    listing = _listing(name)
    _check_parameters(name, parameters, listing.parameters())
    own = {key: value for key, value in parameters.items() if key in listing.rule.model_fields}
    plan = {
        key: _plan_value(name, key, parameters[key]) if key in parameters else value
        for key, value in listing.plan.items()
    }
    rest = {
        listing.renamed.get(k, k): v
        for k, v in parameters.items()
        if k not in own and k not in plan
    }
    if optimizer and rest:
        raise RuleError(
            f"{', '.join(rest)} of rule {name!r} belong to its optimizer, but another optimizer "
            "was given; set them on that one"
        )
    rule = _build(name, listing.rule, own)
    return Recipe(name, rule, optimizer or _build(name, listing.optimizer, rest), plan)


def optimizer(name: str, /, **parameters: Any) -> Optimizer:
    """Return the server optimizer of that name with these parameters.

    Raises RuleError for an unknown name or parameter, and for a value out of range.
    """
    kind = OPTIMIZERS.get(name)
    if kind is None:
        raise RuleError(
            f"no optimizer {name!r}{_nearest(name, OPTIMIZERS)} There are: {', '.join(OPTIMIZERS)}"
        )
    if unknown := [key for key in parameters if key not in kind.model_fields]:
        raise RuleError(
            f"optimizer {name!r} has no parameter {unknown[0]!r}"
            f"{_nearest(unknown[0], kind.model_fields)}"
        )
    return _build(name, kind, parameters)


def _listing(name: str) -> Listing:
    listing = listings().get(name)
    if listing is None:
        raise RuleError(
            f"no rule {name!r}{_nearest(name, listings())} `fairfleet rules` lists them all"
        )
    return listing


def _check_parameters(name: str, parameters: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    if unknown := [key for key in parameters if key not in allowed]:
        raise RuleError(
            f"rule {name!r} has no parameter {unknown[0]!r}{_nearest(unknown[0], allowed)} "
            f"It takes: {', '.join(sorted(allowed))}"
        )


def _plan_value(name: str, key: str, value: Any) -> Any:
    """Return the value of a parameter of local training as the plan has it, such as 0.1 for "0.1".

    A parameter that is no field of the plan is returned as it is.
    """
    if key not in PLAN_FIELDS:
        return value
    field_name = PLAN_FIELDS[key]
    try:
        return getattr(Plan.model_validate({field_name: value}), field_name)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise RuleError(f"rule {name!r} cannot take these values: {key}: {problem}") from error


def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: info.get_default() for name, info in kind.model_fields.items()}


def _nearest(name: str, candidates: Mapping[str, Any]) -> str:
    close = get_close_matches(name, list(candidates), 1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def _build(name: str, kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Build a rule or an optimizer; turn pydantic's error into one that names the parameters."""
    try:
        return kind(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'together'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise RuleError(f"rule {name!r} cannot take these values: {problems}") from error
