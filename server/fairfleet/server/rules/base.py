"""What every rule gets and gives: a cohort of clients in, coefficients and the next state out.

A rule is a frozen set of parameters with one pure method. It sees inner products and reports, never an update, a
socket or the clock; what it must remember from round to round is a small model that goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fairfleet.server.blocks import ColumnRule
from fairfleet.server.gram import Gram

Vector = NDArray[np.float64]
Places = NDArray[np.intp]
Weighting = Literal["samples", "uniform"]


class RuleError(ValueError):
    """A rule cannot do what it was asked: a wrong parameter, or a report that it needs and did not get."""


@dataclass(frozen=True)
class Report:
    """What a client says beside its update. Rules state which of the optional values they need."""

    samples: float
    loss: float  # of the received model on the client's training data, before training
    first_loss: float | None = None  # the same at round 0
    accuracy: float | None = None  # on the training data, between 0 and 1
    participations: float | None = None  # rounds taken part in, this one included
    steps: float | None = None  # of local training
    gradient_norm: float | None = None  # of the full local gradient at the received model
    local_lr: float | None = None
    personal_accuracy: float | None = None  # of Ditto's personal model, on the same data


@dataclass(frozen=True)
class PastRow:
    """A row of the history: whose it is, the round whose model it was computed on, and what was reported with it."""

    client: str
    round: int
    loss: float | None = None
    samples: float | None = None


Absent = Literal["ignore", "history"]


@dataclass(frozen=True)
class Objectives:
    """Whose loss a direction is to lower: the round's clients, then perhaps absent ones."""

    gram: Vector
    losses: Vector
    samples: Vector
    places: Places  # of their rows among the cohort's
    names: Sequence[str]  # of the absent ones

    def __len__(self) -> int:
        return len(self.losses)

    def weights(self, weighting: Weighting) -> Vector:
        shares = self.samples if weighting == "samples" else np.ones(len(self))
        return np.asarray(shares / shares.sum())


@dataclass(frozen=True)
class Cohort:
    """The clients of one round in the order of their ids, then the history rows that may be used."""

    gram: Gram  # over the clients' rows, then the history's
    clients: Sequence[str]
    reports: Sequence[Report]
    round: int = 0
    history: Sequence[PastRow] = ()
    known: int = 0  # how many clients the history holds, rows out of reach included

    def __post_init__(self) -> None:
        if len(self.clients) != len(self.reports) or len(self.gram) != len(self.clients) + len(self.history):
            raise RuleError(
                f"{len(self.clients)} clients with {len(self.reports)} reports and {len(self.history)} history rows, "
                f"but inner products of {len(self.gram)} rows; expected one report per client and one row for each"
            )

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def own(self) -> Gram:
        """The inner products of the clients alone."""
        return self.gram.of(slice(0, len(self)))

    @property
    def samples(self) -> Vector:
        return self.reported("samples")

    @property
    def losses(self) -> Vector:
        return self.reported("loss")

    def reported(self, name: str) -> Vector:
        """One reported value per client; an error that says who left it out."""
        values = [getattr(report, name) for report in self.reports]
        if missing := [client for client, value in zip(self.clients, values, strict=True) if value is None]:
            raise RuleError(
                f"this rule needs {name} from every client and {', '.join(missing[:5])} did not report it; "
                "ask for it in the plan or choose a rule without it"
            )
        return np.array(values, dtype=np.float64)

    def weights(self, weighting: Weighting) -> Vector:
        shares = self.samples if weighting == "samples" else np.ones(len(self))
        return np.asarray(shares / shares.sum())

    def objectives(self, absent: Absent, rounds: int) -> Objectives:
        """The clients; with `history` also those that are absent, by their last row if it is not too old."""
        used = [at for at in self.absent() if absent == "history" and self.round - self.history[at].round <= rounds]
        used = [at for at in used if self.history[at].loss is not None]
        past = [self.history[at] for at in used]
        places = np.array([*range(len(self)), *(len(self) + at for at in used)], dtype=np.intp)
        return Objectives(
            gram=self.gram.of(places).whole,
            losses=np.concatenate([self.losses, [row.loss for row in past]]),
            samples=np.concatenate([self.samples, [row.samples or 0.0 for row in past]]),
            places=places,
            names=[row.client for row in past],
        )

    def absent(self) -> list[int]:
        """Places in the history of clients that are not here."""
        here = set(self.clients)
        return [at for at, row in enumerate(self.history) if row.client not in here]


class State(BaseModel):
    """What a rule remembers. Per-client values are keyed by client id, so they outlive a restart and an absence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Found(NamedTuple):
    halvings: int  # of the longest trial
    accepted: bool  # else it is the best of those that were not


class Search(Protocol):
    def __call__(self, clients: Sequence[str], before: Vector, after: Vector, *, rate: float) -> Found | None:
        """Which trial to take, by the losses before (one per client) and after (one line per trial); None: no one.

        `rate` is the optimizer's, of the step that was not lengthened.
        """


@dataclass(frozen=True)
class Trials:
    """Steps for clients to try before one is taken: 2^-k times the longest, k = 0 to `halvings`."""

    halvings: int
    doublings: int = 0  # the longest is 2^doublings times the optimizer's step
    search: Search | None = None  # None: by the share of clients whose loss falls

    def factor(self, halvings: int | None) -> float:
        """Of the optimizer's step, which a trial is; none is 0."""
        return 0.0 if halvings is None else 2.0 ** (self.doublings - halvings)


@dataclass(frozen=True)
class Step:
    """A rule's answer. The direction is the sum of coefficients times rows; the model moves against it."""

    coefficients: Vector  # per row (clients, then history), or per layer and row
    status: str = "ok"  # or the fallback that was taken
    state: State = field(default_factory=State)
    columns: ColumnRule | None = None  # instead of coefficients: a function of the columns
    certainty: float = 1.0  # for AdaFedAdam's server optimizer
    trials: Trials | None = None  # that the rule wants, whatever the server was told
    notes: Mapping[str, Any] = field(default_factory=dict)  # for the round's record


@dataclass(frozen=True)
class Needs:
    """What a rule asks of the server and, through the plan, of the clients."""

    reports: tuple[str, ...] = ()  # beside samples and loss
    layers: bool = False
    columns: bool = False
    line_search: bool = False  # its steps come with trials


class Rule(BaseModel):
    """Parameters of a rule, checked, and the rule as a pure function of cohort and state."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    summary: ClassVar[str] = ""
    Memory: ClassVar[type[State]] = State  # what it remembers

    def needs(self) -> Needs:
        return Needs()

    def is_plain_mean(self) -> bool:
        """Whether its direction is the mean of the updates, all alike, whatever is in them or reported with them.

        Only such a mean can be made private by noise that is added to it.
        """
        return False

    def window(self, known: int, clients: int) -> int:
        """How many rounds back absent clients' rows are used, when `known` clients have one and `clients` are here."""
        return 0

    def initial(self) -> State:
        return self.Memory()

    def step(self, cohort: Cohort, state: Any) -> Step:
        raise NotImplementedError
