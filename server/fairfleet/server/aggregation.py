"""One round's aggregation: rows in as they arrive, then rule, combination and optimizer, and a new model out.

This is what the server calls, and what anyone with plain arrays can call without a server: see `aggregate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairfleet.server.blocks import Row
from fairfleet.server.diagnostics import Diagnostics, diagnose
from fairfleet.server.gram import GramEngine, Kernel
from fairfleet.server.gram_many import kernel_for
from fairfleet.server.history import History
from fairfleet.server.optimizers import OptimizerState
from fairfleet.server.rules.base import Cohort, Report, RuleError, State, Step, Trials
from fairfleet.server.rules.registry import Recipe


@dataclass(frozen=True)
class ServerState:
    """Everything that outlives a round beside the model and the history. None: the start of a training."""

    rule: State | None = None
    optimizer: OptimizerState | None = None


@dataclass(frozen=True)
class Direction:
    """What the rule chose, before any optimizer."""

    vector: Row
    cohort: Cohort
    choice: Step
    diagnostics: Diagnostics


@dataclass(frozen=True)
class Taken:
    vector: Row  # to be subtracted from the model
    state: ServerState
    diagnostics: Diagnostics
    trials: Trials | None = None  # that the rule wants before the step is taken
    rate: float = 1.0  # length of the step over that of the direction, where there are trials


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
    ) -> None:
        self.recipe, self.round, self.history = recipe, round, history
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
        cohort = self._cohort(reports)
        choice = rule.step(cohort, rule.initial() if state is None else state)
        order = self._order(cohort)
        if choice.columns:
            vector = self.engine.columns(order[: len(cohort)], choice.columns, out)
        else:
            vector = self.engine.combine(order[: choice.coefficients.shape[-1]], choice.coefficients, out)
        return Direction(vector, cohort, choice, diagnose(self.recipe.name, cohort, choice))

    def finish(self, model: Row, reports: Mapping[str, Report], state: ServerState | None = None) -> Outcome:
        """The new model, the state for the next round, and what the step means for each client."""
        taken = self.step(reports, state)
        return Outcome(model - taken.vector, taken.vector, taken.state, taken.diagnostics)

    def step(self, reports: Mapping[str, Report], state: ServerState | None = None, out: Row | None = None) -> Taken:
        """What to subtract from the model, in `out` if given."""
        state = state or ServerState()
        direction = self.direction(reports, state.rule, out)
        optimizer, vector = self.recipe.optimizer, direction.vector
        before = state.optimizer or optimizer.initial(vector.size, vector.dtype)
        after = optimizer.step(vector, before, round=self.round, certainty=direction.choice.certainty)
        trials, told = direction.choice.trials, direction.diagnostics
        rate = float(np.linalg.norm(vector)) / told.direction_norm if trials and told.direction_norm else 1.0
        return Taken(vector, ServerState(direction.choice.state, after), told, trials, rate)

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

    def _cohort(self, reports: Mapping[str, Report]) -> Cohort:
        clients = sorted(self._clients)
        if not clients:
            raise RuleError(f"round {self.round} has no update; add at least one before asking for a direction")
        if missing := [client for client in clients if client not in reports]:
            raise RuleError(f"no report from {', '.join(missing[:5])}; every update needs one")
        past = [client for client in self._past(len(clients)) if client not in set(clients)]
        if self.history:
            late = {("past", client): self.history.row(client) for client in past}
            self.engine.extend({row_id: row for row_id, row in late.items() if row_id not in self.engine})
        return Cohort(
            gram=self.engine.gram([("now", one) for one in clients] + [("past", one) for one in past]),
            clients=clients,
            reports=[reports[client] for client in clients],
            round=self.round,
            history=[self.history.rows()[client] for client in past] if self.history else (),
            known=len(self.history) if self.history else 0,
        )

    def _order(self, cohort: Cohort) -> list[tuple[str, str]]:
        return [("now", client) for client in cohort.clients] + [("past", past.client) for past in cohort.history]


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
    whole = Aggregation(recipe, layers or [model.size], round=round, history=history, expected=clients, kernel=kernel)
    whole.extend(dict(sorted(rows.items())))
    return whole.finish(model, reports, state)


def scaled(outcome: Outcome, model: Row, factor: float) -> Outcome:
    """The same outcome with a shorter or longer step: for a line search or verified descent on the way to a commit."""
    step = np.multiply(outcome.step, outcome.step.dtype.type(factor))
    return replace(outcome, model=model - step, step=step)
