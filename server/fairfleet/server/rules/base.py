"""The interface of a rule: parameters and needs, a cohort and a state in, a step out.

A rule is a frozen set of parameters with one pure method, `step`. It sees inner products and
reports, never an update, a socket or the clock. What it must remember from round to round is a
small `State` that goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from fairfleet.common.training_plan import Plan
from fairfleet.server.gram import ColumnRule
from fairfleet.server.rules.cohort import Cohort, Vector

Losses = Literal["any", "non_negative", "positive"]
# What a rule's layers are: parameter tensors, or the tensors of a module together.
Blocks = Literal["tensors", "modules"]


class State(BaseModel):
    """What a rule remembers from round to round; subclass it to remember something.

    Key per-client values by client id: they then survive a restart and an absence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class LineSearchResult(NamedTuple):
    """The trial step that a line search chose."""

    halvings: int  # of the longest trial
    accepted: bool  # False: no trial met the condition, and this is the best of them


class LineSearch(Protocol):
    """A function that chooses among trial steps by the losses that clients measured."""

    def __call__(
        self, clients: Sequence[str], before: Vector, after: Vector, *, rate: float
    ) -> LineSearchResult | None:
        """Return the trial to take, or None to take no step.

        `before` has one loss per client, `after` one line of losses per trial, the longest trial
        first. `rate` is the optimizer's learning rate for a step of factor 1.
        """


@dataclass(frozen=True)
class StepTrials:
    """Steps that clients try before one is taken: 2^-k times the longest, k = 0 to `halvings`."""

    halvings: int
    doublings: int = 0  # the longest trial is 2^doublings times the optimizer's step
    search: LineSearch | None = None  # None: choose by the share of clients whose loss falls

    def factor(self, halvings: int | None) -> float:
        """Return the length of a trial in optimizer's steps; 0 if no trial was chosen (None)."""
        return 0.0 if halvings is None else 2.0 ** (self.doublings - halvings)


@dataclass(frozen=True)
class Step:
    """The result of a rule for one round.

    The direction is the sum of coefficients times rows, and the model moves against it.
    """

    # One per row (clients, then history), or an array of shape (layers, rows).
    coefficients: Vector
    status: str = "ok"  # or the name of the fallback that was used
    state: State = field(default_factory=State)  # for the next round
    # Used instead of the coefficients: a function (rows, columns) -> (columns,).
    columns: ColumnRule | None = None
    # The clients' shares in the model's buffers, such as batch statistics; None: by samples.
    buffer_shares: Vector | None = None
    certainty: float = 1.0  # for the server optimizer `certainty_adam`
    trials: StepTrials | None = None  # replaces the trials of the server's settings
    notes: Mapping[str, Any] = field(default_factory=dict)  # written to the round's record


@dataclass(frozen=True)
class Needs:
    """What a rule needs from the server and, through the training plan, from the clients."""

    reports: tuple[str, ...] = ()  # fields of `Report` besides samples and loss
    # The losses for which the rule is defined. Choose "any" only if a constant added to all
    # losses never reverses which clients the rule favours.
    losses: Losses = "any"
    positive: tuple[str, ...] = ()  # reports by which the rule divides: they must be above zero
    # Whether the rule reads inner products (`gram.whole`). Lengths (`gram.norms`) are always there.
    products: bool = True
    layers: bool = False  # whether the rule reads the products inside each layer (`gram.layers`)
    columns: bool = False  # whether its steps have `columns` instead of coefficients
    line_search: bool = False  # whether its steps have trials
    # Whether the rule reads losses. Its papers mean F_k of the received model over all training
    # data, so clients then measure them exactly, in a pass of their own.
    exact_losses: bool = True
    # Whether `first_loss` is the loss on the federation's initial model. A client whose first round
    # is a later one then measures it. Otherwise it is the loss at the first participation.
    initial_loss: bool = False


class Rule(BaseModel):
    """The checked parameters of an aggregation rule, and the rule as a pure function.

    Subclass it, declare parameters as pydantic fields, and implement `step`. Override the other
    methods where the defaults do not fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    summary: ClassVar[str] = ""  # one line for `fairfleet rules`
    Memory: ClassVar[type[State]] = State  # the class of what the rule remembers

    def needs(self) -> Needs:
        """Return what the rule needs; by default the inner products, and any finite loss."""
        return Needs()

    def for_plan(self, plan: Plan) -> Rule:
        """Return the rule for clients that train by this plan.

        A rule whose formula depends on the local solver overrides it, and raises RuleError for a
        solver that the formula does not cover.
        """
        return self

    def blocks(self) -> Blocks:
        """Return the blocks of a model that the rule's layers are."""
        return "tensors"

    def keeping_blocks(self, blocks: Blocks) -> Rule:
        """Return the rule for a federation that began with these blocks.

        They replace a default, not a parameter that was given.
        """
        return self

    def keeping_first_losses(self) -> Rule:
        """Return the rule for a federation that began with losses at first participations.

        They replace a default, not a parameter that was given.
        """
        return self

    def is_plain_mean(self) -> bool:
        """Return whether the direction is always the unweighted mean of the updates.

        It must not depend on the updates or on reports. Only such a mean can be made private by
        noise that is added to it.
        """
        return False

    def window(self, known_clients: int, clients: int) -> int:
        """Return for how many rounds the rows of absent clients are used; 0 for none.

        `known_clients` have a row in the history; `clients` take part in this round.
        """
        return 0

    def initial(self) -> State:
        """Return the state before the first round."""
        return self.Memory()

    def step(self, cohort: Cohort, state: Any) -> Step:
        """Return the step of one round. It must not change its arguments or keep anything."""
        raise NotImplementedError


def reads_products(rule: Rule) -> bool:
    """Return whether a rule may read inner products."""
    return rule.needs().products or _has_newer_step(rule)


def reads_losses(rule: Rule) -> bool:
    """Return whether a rule may read losses, or accuracies, which the same pass measures."""
    needs = rule.needs()
    return needs.exact_losses or "accuracy" in needs.reports or _has_newer_step(rule)


def _has_newer_step(rule: Rule) -> bool:
    """Return whether a subclass overrides `step` but not `needs`.

    It may read anything: the inherited needs were stated for another `step`.
    """
    classes = type(rule).__mro__
    step, needs = (
        next(depth for depth, kind in enumerate(classes) if name in vars(kind))
        for name in ("step", "needs")
    )
    return step < needs
