"""One round's aggregation: rows in as they arrive, then rule, combination and optimizer, and a new model out.

This is what the server calls, and what anyone with plain arrays can call without a server: see `aggregate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fairfleet.server.admission import Claims, Finding, Gate, Judgement, judge, judge_stand_ins
from fairfleet.server.blocks import ColumnRule, Row
from fairfleet.server.diagnostics import Diagnostics, diagnose
from fairfleet.server.gram import GramEngine, Kernel
from fairfleet.server.gram_many import kernel_for
from fairfleet.server.history import History
from fairfleet.server.optimizers import OptimizerState
from fairfleet.server.rules.base import Cohort, PastRow, Report, RuleError, State, Step, Trials, Vector
from fairfleet.server.rules.registry import Recipe

Disguise = Callable[[Row, int], None]  # adds noise to the mean of so many updates, in place


@dataclass(frozen=True)
class ServerState:
    """Everything that outlives a round beside the model and the history. None: the start of a training."""

    rule: State | None = None
    optimizer: OptimizerState | None = None


@dataclass(frozen=True)
class Admitted:
    """The cohort as its rule sees it, and what was out of the ordinary in the round."""

    cohort: Cohort
    factors: Vector  # of the rows, clients' and history's: a row that is clipped is not copied, only counted for less
    findings: tuple[Finding, ...] = ()

    @property
    def reports(self) -> dict[str, Report]:
        """Of the clients whose updates count."""
        return dict(zip(self.cohort.clients, self.cohort.reports, strict=True))


@dataclass(frozen=True)
class Direction:
    """What the rule chose, before any optimizer."""

    vector: Row
    admitted: Admitted
    choice: Step
    diagnostics: Diagnostics

    @property
    def cohort(self) -> Cohort:
        return self.admitted.cohort


@dataclass(frozen=True)
class Taken:
    vector: Row  # to be subtracted from the model
    state: ServerState
    diagnostics: Diagnostics
    trials: Trials | None = None  # that the rule wants before the step is taken
    rate: float = 1.0  # length of the step over that of the direction, where there are trials
    reports: Mapping[str, Report] = field(default_factory=dict)  # of the clients that count, as the rule saw them
    findings: tuple[Finding, ...] = ()  # of admission


@dataclass(frozen=True)
class Outcome:
    model: Row
    step: Row  # model before - model after
    state: ServerState
    diagnostics: Diagnostics


class Aggregation:
    """The rows of one round. `expected` clients are those asked to take part: their own history rows can wait."""

    def __init__(
        self,
        recipe: Recipe,
        layers: Sequence[int],
        *,
        round: int = 0,
        history: History | None = None,
        expected: Sequence[str] = (),
        kernel: Kernel | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.recipe, self.round, self.history = recipe, round, history
        self.gate = gate or Gate()
        self._clients: list[str] = []
        self.engine = GramEngine(layers, kernel)
        if history and expected:
            past = [client for client in self._past(len(expected)) if client not in set(expected)]
            self.engine.adopt({("past", one): history.row(one) for one in past}, history.products(past))

    @property
    def clients(self) -> set[str]:
        """Whose update is in."""
        return set(self._clients)

    def add(self, client: str, row: Row) -> None:
        """Takes an update in. Its inner products are computed now, while other clients still train."""
        self.extend({client: row})

    def extend(self, rows: Mapping[str, Row]) -> None:
        self.engine.extend({("now", client): row for client, row in rows.items()})
        self._clients += rows

    def direction(self, reports: Mapping[str, Report], state: State | None = None, out: Row | None = None) -> Direction:
        """Rule and combination, over the clients in the order of their ids."""
        rule = self.recipe.rule
        admitted = self._admitted(reports)
        cohort, factors = admitted.cohort, admitted.factors
        choice = rule.step(cohort, rule.initial() if state is None else state)
        order, used = self._order(cohort), choice.coefficients.shape[-1]
        if choice.columns:
            reduce = of_scaled(choice.columns, factors[: len(cohort)])
            vector = self.engine.columns(order[: len(cohort)], reduce, out)
        else:
            vector = self.engine.combine(order[:used], choice.coefficients * factors[:used], out)
        return Direction(vector, admitted, choice, diagnose(self.recipe.name, cohort, choice))

    def finish(self, model: Row, reports: Mapping[str, Report], state: ServerState | None = None) -> Outcome:
        """The new model, the state for the next round, and what the step means for each client."""
        taken = self.step(reports, state)
        return Outcome(model - taken.vector, taken.vector, taken.state, taken.diagnostics)

    def step(
        self,
        reports: Mapping[str, Report],
        state: ServerState | None = None,
        out: Row | None = None,
        disguise: Disguise | None = None,
    ) -> Taken:
        """What to subtract from the model, in `out` if given. The optimizer sees only what is disguised."""
        state = state or ServerState()
        direction = self.direction(reports, state.rule, out)
        optimizer, vector = self.recipe.optimizer, direction.vector
        if disguise is not None:
            disguise(vector, len(direction.cohort))
        before = state.optimizer or optimizer.initial(vector.size, vector.dtype)
        after = optimizer.step(vector, before, round=self.round, certainty=direction.choice.certainty)
        trials, told = direction.choice.trials, direction.diagnostics
        rate = float(np.linalg.norm(vector)) / told.direction_norm if trials and told.direction_norm else 1.0
        state, admitted = ServerState(direction.choice.state, after), direction.admitted
        return Taken(vector, state, told, trials, rate, admitted.reports, admitted.findings)

    def remember(self, rows: Mapping[str, Row], reports: Mapping[str, Report] | None = None) -> list[str]:
        """Puts the round's rows into the history, with the inner products that are known already; says whose."""
        if self.history is None:
            return []
        told = {client: (report.loss, report.samples) for client, report in (reports or {}).items()}
        kept = []
        for client, row in sorted(rows.items()):
            loss, samples = told.get(client, (None, None))
            if self.history.put(client, self.round, row, loss=loss, samples=samples):
                kept.append(client)
        if all(rows[client].dtype == self.history.precision for client in kept):
            past = [client for client in self.history.rows() if client not in rows and ("past", client) in self.engine]
            ids = [("now", client) for client in kept] + [("past", client) for client in past]
            self.history.learn([*kept, *past], self.engine.gram(ids))
        return kept

    def _past(self, clients: int) -> list[str]:
        if self.history is None:
            return []
        return self.history.within(self.round, self.recipe.rule.window(len(self.history), clients))

    def _admitted(self, reports: Mapping[str, Report]) -> Admitted:
        clients = sorted(self._clients)
        if not clients:
            raise RuleError(f"round {self.round} has no update; add at least one before asking for a direction")
        if missing := [client for client in clients if client not in reports]:
            raise RuleError(f"no report from {', '.join(missing[:5])}; every update needs one")
        claims = self._claims(clients, [reports[client] for client in clients])
        found = judge(claims, self.gate)
        taken = np.flatnonzero(~found.rejected)
        here = [clients[at] for at in taken.tolist()]
        rows, held = self._standing_in([client for client in self._past(len(here)) if client not in set(here)], claims)
        cohort = Cohort(
            gram=self.engine.gram([("now", one) for one in here] + [("past", row.client) for row in rows]),
            clients=here,
            reports=[admitted_report(reports[clients[at]], found, at) for at in taken.tolist()],
            round=self.round,
            history=rows,
            known=len(self.history) if self.history else 0,
        )
        factors = np.concatenate([found.factors[taken], held.factors[~held.rejected]])
        cohort = replace(cohort, gram=cohort.gram.scaled(factors))
        return Admitted(cohort, factors, found.findings + held.findings)

    def _claims(self, clients: Sequence[str], reports: Sequence[Report]) -> Claims:
        return Claims(
            clients,
            self.engine.norms([("now", client) for client in clients]),
            np.array([report.loss for report in reports], np.float64),
            np.array([report.samples for report in reports], np.float64),
            [self.gate.watched.recent(client) for client in clients],
        )

    def _standing_in(self, clients: Sequence[str], present: Claims) -> tuple[list[PastRow], Judgement]:
        """The history's rows of these clients that may be used, with what they report admitted; and all as judged.

        They are held to the limits of this round: a row may have come too late for its own, or before there were any.
        """
        rows, norms = list[PastRow](), np.zeros(0)
        if self.history:
            late = {("past", client): self.history.row(client) for client in clients}
            self.engine.extend({row_id: row for row_id, row in late.items() if row_id not in self.engine})
            rows = [self.history.rows()[client] for client in clients]
            norms = self.engine.norms([("past", client) for client in clients])
        losses = np.array([-np.inf if row.loss is None else row.loss for row in rows])
        samples = np.array([row.samples or 0.0 for row in rows])
        found = judge_stand_ins(Claims(clients, norms, losses, samples), present, self.gate)
        used = [admitted_row(row, found, at) for at, row in enumerate(rows) if not found.rejected[at]]
        return used, found

    def _order(self, cohort: Cohort) -> list[tuple[str, str]]:
        return [("now", client) for client in cohort.clients] + [("past", past.client) for past in cohort.history]


def admitted_report(report: Report, found: Judgement, at: int) -> Report:
    loss, samples = float(found.losses[at]), float(found.samples[at])
    if loss == report.loss and samples == report.samples:
        return report
    return replace(report, loss=loss, samples=samples)


def admitted_row(row: PastRow, found: Judgement, at: int) -> PastRow:
    loss = None if row.loss is None else float(found.losses[at])
    samples = None if row.samples is None else float(found.samples[at])
    return replace(row, loss=loss, samples=samples)


def of_scaled(reduce: ColumnRule, factors: Vector) -> ColumnRule:
    """The same function of rows that are multiplied by factors, block by block as it reads them."""
    if (factors == 1.0).all():
        return reduce
    return lambda columns: reduce(columns * factors[:, None].astype(columns.dtype))


def aggregate(
    model: Row,
    rows: Mapping[str, Row],
    reports: Mapping[str, Report],
    recipe: Recipe,
    *,
    state: ServerState | None = None,
    layers: Sequence[int] | None = None,
    round: int = 0,
    history: History | None = None,
    gate: Gate | None = None,
) -> Outcome:
    """One step on plain arrays, without any server. rows are theta_received - theta_trained, one per client.

    >>> from fairfleet.server.rules import Report, recipe
    >>> rows = {"ann": np.array([1.0, 0.0]), "bob": np.array([-0.5, 1.0])}
    >>> reports = {"ann": Report(samples=90, loss=0.2), "bob": Report(samples=10, loss=1.5)}
    >>> out = aggregate(np.zeros(2), rows, reports, recipe("fedmgda"))
    >>> {client: round(float(row @ out.step), 3) for client, row in rows.items()}  # nobody is harmed
    {'ann': 0.308, 'bob': 0.308}
    >>> out.diagnostics.conflicts
    []
    """
    clients, kernel = sorted(rows), kernel_for(len(rows))
    sizes = layers or [model.size]
    whole = Aggregation(recipe, sizes, round=round, history=history, expected=clients, kernel=kernel, gate=gate)
    whole.extend(dict(sorted(rows.items())))
    return whole.finish(model, reports, state)


def scaled(outcome: Outcome, model: Row, factor: float) -> Outcome:
    """The same outcome with a shorter or longer step: for a line search or verified descent on the way to a commit."""
    step = np.multiply(outcome.step, outcome.step.dtype.type(factor))
    return replace(outcome, model=model - step, step=step)
