"""Aggregates one round: takes rows as they arrive, then computes direction, step and next model.

The server and the simulation call `Aggregation`. `aggregate` does a round on plain arrays without
any server. The step depends only on the rows, the reports and the state, not on the order or the
time in which the rows arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from fairfleet.server.aggregation.admission import AdmissionContext
from fairfleet.server.aggregation.buffers import BufferRule
from fairfleet.server.aggregation.cohort_admission import (
    CohortAdmission,
    past_id,
    row_order,
    update_id,
)
from fairfleet.server.aggregation.diagnostics import (
    DETAILS,
    DiagnosticsSetting,
    Level,
    diagnose,
    level_for,
)
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.isolation import Attempt
from fairfleet.server.aggregation.results import (
    AdmittedCohort,
    AggregatedStep,
    Direction,
    Outcome,
    ServerState,
)
from fairfleet.server.gram import Detail, Gram, GramEngine, Kernel, cancels
from fairfleet.server.gram.blocks import ColumnRule, Row, length
from fairfleet.server.gram.matmul_kernel import kernel_for
from fairfleet.server.rules import Report, State, Step, Vector
from fairfleet.server.rules.base import reads_products
from fairfleet.server.rules.checks import choose_step
from fairfleet.server.rules.errors import RuleError
from fairfleet.server.rules.optimizer_vectors import OptimizerState, check_finite
from fairfleet.server.rules.registry import Recipe

AddNoise = Callable[[Row, int], None]  # adds noise, in place, to the mean of that many updates
EVERYTHING = Attempt()  # every update and the history


class Aggregation:
    """The rows of one round.

    `expected` are the clients that were selected. Their own rows of the history are multiplied
    only if their updates do not arrive.

    `diagnostics` decides which figures come with the step (see `diagnostics.level_for`). No more
    inner products are computed than these figures and the rule need. The step is the same, bit for
    bit, at every level.
    """

    def __init__(
        self,
        recipe: Recipe,
        layers: Sequence[int],
        *,
        round_number: int = 0,
        history: History | None = None,
        expected: Sequence[str] = (),
        kernel: Kernel | None = None,
        admission: AdmissionContext | None = None,
        diagnostics: DiagnosticsSetting = "auto",
    ) -> None:
        self.recipe, self.round, self.history = recipe, round_number, history
        self.admission = admission or AdmissionContext()
        self.diagnostics: DiagnosticsSetting = diagnostics
        self._layers = len(layers)
        self._clients: list[str] = []
        self._expected = set(expected)
        self._withdrawn: set[str] = set()
        self._rule_detail = detail_for(recipe)
        past = self._unexpected_past(len(expected)) if expected else []
        self.engine = GramEngine(
            layers, kernel, detail=self._detail(), expected=len(expected) + len(past)
        )
        if history and past:
            history.keep_blocks(self.engine.blocks)
            self.engine.adopt(
                {past_id(client): history.row(client) for client in past}, history.products(past)
            )

    @property
    def clients(self) -> set[str]:
        """The clients whose updates have arrived."""
        return set(self._clients)

    @property
    def level(self) -> Level:
        """Which figures come with the step.

        The setting decides, or the number of clients that were selected or have arrived.
        """
        count = max(len(self._expected), len(self._clients))
        return level_for(self.diagnostics, count, self._layers)

    # ---- rows --------------------------------------------------------------------------------

    def expect(self, clients: Collection[str]) -> None:
        """Expect updates of these clients as well."""
        self._expected.update(clients)
        self.engine.reduce(self._detail())

    def add(self, client: str, row: Row) -> None:
        """Add an update. Its inner products are computed now, while other clients still train."""
        self.extend({client: row})

    def extend(self, rows: Mapping[str, Row]) -> None:
        """Add several updates, which is cheaper than adding them one by one."""
        self.expect(rows.keys())
        self.engine.extend({update_id(client): row for client, row in rows.items()})
        self._clients += rows

    def withdraw(self, client: str) -> None:
        """Leave out a revoked client: neither its update nor its row of the history counts.

        Inner products that were computed stay in the engine, unused.
        """
        self._withdrawn.add(client)
        self._clients = [present for present in self._clients if present != client]

    def norms(self, clients: Sequence[str]) -> Vector:
        """Return the lengths of these clients' updates."""
        return self.engine.norms([update_id(client) for client in clients])

    def _detail(self) -> Detail:
        """Return the least detail that rule, history and diagnostics need."""
        # The history stores the inner products of the round's rows.
        for_history = Detail.WHOLE if self.history is not None else Detail.NORMS
        return max(self._rule_detail, DETAILS[self.level], for_history)

    def _past_clients(self, count: int) -> list[str]:
        """Return the clients whose rows of the history the rule uses in a round of that many."""
        if self.history is None:
            return []
        window = self.recipe.rule.window(len(self.history), count)
        past = self.history.within(self.round, window)
        return [client for client in past if client not in self._withdrawn]

    def _unexpected_past(self, count: int) -> list[str]:
        return [client for client in self._past_clients(count) if client not in self._expected]

    # ---- direction and step --------------------------------------------------------------------

    def direction(
        self,
        reports: Mapping[str, Report],
        state: State | None = None,
        out: Row | None = None,
        attempt: Attempt = EVERYTHING,
    ) -> Direction:
        """Apply the rule and combine the rows, with the clients in the order of their ids.

        Raises RuleError if there is no update, or an update without a report.
        """
        rule = self.recipe.rule
        admitted = self._admitted(reports, attempt)
        choice = choose_step(rule, admitted.cohort, rule.initial() if state is None else state)
        vector, is_finite = self._combined(admitted, choice, out)
        level = self.level
        products = self._products_for(level, admitted)
        figures = diagnose(self.recipe.name, admitted.cohort, choice, level, products, vector)
        return Direction(vector, admitted, choice, figures, is_finite)

    def step(
        self,
        reports: Mapping[str, Report],
        state: ServerState | None = None,
        out: Row | None = None,
        add_noise: AddNoise | None = None,
        attempt: Attempt = EVERYTHING,
    ) -> AggregatedStep:
        """Return what to subtract from the model, in `out` if given.

        The optimizer sees the direction only after noise was added. The given state stays valid
        until a step is made from the returned one. Raises NonFiniteStep, without a change to any
        state, if the step or the optimizer's next state is not finite.
        """
        state = state or ServerState()
        direction = self.direction(reports, state.rule, out, attempt)
        vector, trials = direction.vector, direction.choice.trials
        if add_noise is not None:
            add_noise(vector, len(direction.cohort))
        length_before = length(vector) if trials else 0.0
        optimizer_state = self._optimize(direction, state.optimizer, noisy=add_noise is not None)
        return AggregatedStep(
            vector,
            ServerState(direction.choice.state, optimizer_state),
            direction.diagnostics,
            trials,
            length(vector) / length_before if length_before else 1.0,
            direction.admitted.reports,
            direction.admitted.findings,
            buffer_rule(direction),
        )

    def finish(
        self, model: Row, reports: Mapping[str, Report], state: ServerState | None = None
    ) -> Outcome:
        """Return the next model, the next state, and what the step means for each client."""
        step = self.step(reports, state)
        return Outcome(model - step.vector, step.vector, step.state, step.diagnostics)

    def _admitted(self, reports: Mapping[str, Report], attempt: Attempt) -> AdmittedCohort:
        clients = sorted(set(self._clients) - attempt.without)
        if not clients:
            raise RuleError(
                f"round {self.round} has no update; add at least one before computing a direction"
            )
        if missing := [client for client in clients if client not in reports]:
            raise RuleError(f"no report from {', '.join(missing[:5])}; every update needs one")
        admission = CohortAdmission(
            self.engine,
            self.history if attempt.with_history else None,
            self.admission,
            self._rule_detail,
            self.round,
        )
        past_clients = self._past_clients if attempt.with_history else lambda count: []
        return admission.admit(clients, reports, past_clients)

    def _combined(
        self, admitted: AdmittedCohort, choice: Step, out: Row | None
    ) -> tuple[Row, bool]:
        """Return the direction that the rule chose, and whether it was found to be finite."""
        cohort, order = admitted.cohort, row_order(admitted.cohort)
        if choice.columns:
            reduce = scaled_rule(choice.columns, admitted.factors[: len(cohort)])
            return self.engine.columns(order[: len(cohort)], reduce, out), False
        used = choice.coefficients.shape[-1]
        wide = None
        if cohort.gram.detail is not Detail.NORMS:
            wide = cancels(cohort.gram.of(slice(0, used)), choice.coefficients)
        coefficients = choice.coefficients * admitted.factors[:used]
        return self.engine.combine_checked(order[:used], coefficients, out, wide)

    def _products_for(self, level: Level, admitted: AdmittedCohort) -> Gram | None:
        """Return the inner products for the figures of this level; None if it has no figures."""
        cohort = admitted.cohort
        if level == "off":
            return None
        if cohort.gram.detail >= DETAILS[level]:
            return cohort.gram
        return self.engine.gram(row_order(cohort), DETAILS[level]).scaled(admitted.factors)

    def _optimize(
        self, direction: Direction, state: OptimizerState | None, *, noisy: bool
    ) -> OptimizerState:
        """Turn the direction, in place, into the step; return the optimizer's next state."""
        optimizer, vector = self.recipe.optimizer, direction.vector
        after = optimizer.step(
            vector,
            state or optimizer.initial(vector.size, vector.dtype),
            round_number=self.round,
            certainty=direction.choice.certainty,
        )
        unchanged = not noisy and optimizer.is_identity(self.round)
        check_finite(vector, after, step_is_finite=direction.is_finite and unchanged)
        return after

    # ---- history -------------------------------------------------------------------------------

    def remember(
        self, rows: Mapping[str, Row], reports: Mapping[str, Report] | None = None
    ) -> list[str]:
        """Put rows of this round into the history; return the clients whose rows it took.

        Inner products that are computed already are stored with them.
        """
        history = self.history
        if history is None:
            return []
        remembered = [
            client
            for client, row in sorted(rows.items())
            if self._put(history, client, row, (reports or {}).get(client))
        ]
        # A row that the history rounds has other inner products there.
        if all(rows[client].dtype == history.precision for client in remembered):
            self._learn_products(history, remembered, rows.keys())
        return remembered

    def _put(self, history: History, client: str, row: Row, report: Report | None) -> bool:
        loss, samples = (report.loss, report.samples) if report else (None, None)
        return history.put(client, self.round, row, loss=loss, samples=samples)

    def _learn_products(
        self, history: History, remembered: Sequence[str], present: Collection[str]
    ) -> None:
        past = [
            client
            for client in history.rows()
            if client not in present and past_id(client) in self.engine
        ]
        row_ids = [update_id(client) for client in remembered]
        row_ids += [past_id(client) for client in past]
        history.keep_blocks(self.engine.blocks)
        history.learn([*remembered, *past], self.engine.gram(row_ids))


def detail_for(recipe: Recipe) -> Detail:
    """Return which inner products the rule reads."""
    if recipe.rule.needs().layers:
        return Detail.LAYERS
    return Detail.WHOLE if reads_products(recipe.rule) else Detail.NORMS


def buffer_rule(direction: Direction) -> BufferRule:
    """Return how buffers are merged, from what was decided about the updates they came with."""
    cohort, choice = direction.cohort, direction.choice
    shares = cohort.samples if choice.buffer_shares is None else choice.buffer_shares
    if not shares.any():
        shares = np.ones(len(cohort))
    return BufferRule(shares, direction.admitted.factors[: len(cohort)], choice.columns)


def scaled_rule(reduce: ColumnRule, factors: Vector) -> ColumnRule:
    """Return the same function of rows that are multiplied by factors, block by block."""
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
    round_number: int = 0,
    history: History | None = None,
    admission: AdmissionContext | None = None,
    diagnostics: DiagnosticsSetting = "auto",
) -> Outcome:
    """Aggregate one round on plain arrays, without any server.

    `rows` has one row per client: the parameters that it received minus those that it trained.

    >>> from fairfleet.server.rules import Report, recipe
    >>> rows = {"ann": np.array([1.0, 0.0]), "bob": np.array([-0.5, 1.0])}
    >>> reports = {"ann": Report(samples=90, loss=0.2), "bob": Report(samples=10, loss=1.5)}
    >>> out = aggregate(np.zeros(2), rows, reports, recipe("fedmgda"))
    >>> {client: round(float(row @ out.step), 3) for client, row in rows.items()}  # both improve
    {'ann': 0.308, 'bob': 0.308}
    >>> out.diagnostics.conflicts
    []
    """
    aggregation = Aggregation(
        recipe,
        layers or [model.size],
        round_number=round_number,
        history=history,
        expected=sorted(rows),
        kernel=kernel_for(len(rows)),
        admission=admission,
        diagnostics=diagnostics,
    )
    aggregation.extend(dict(sorted(rows.items())))
    return aggregation.finish(model, reports, state)
