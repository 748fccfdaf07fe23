"""Builds the cohort that a rule sees: admitted updates, and rows of the history for absent clients.

`admission` decides; this module lays out the values that it decides about and applies its decision.
Rows are never copied: an update that is clipped gets a factor, and its inner products are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairfleet.server.aggregation.admission import (
    AdmissionContext,
    AdmissionDecision,
    ReportedValues,
    judge,
    judge_stand_ins,
)
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.results import AdmittedCohort
from fairfleet.server.gram import Detail, GramEngine
from fairfleet.server.rules import Cohort, PastRow, Report

RowId = tuple[str, str]


def update_id(client: str) -> RowId:
    """Return the engine's id of a client's update of this round."""
    return ("now", client)


def past_id(client: str) -> RowId:
    """Return the engine's id of a client's row of the history."""
    return ("past", client)


def row_order(cohort: Cohort) -> list[RowId]:
    """Return the ids of a cohort's rows in the order of its inner products."""
    present = [update_id(client) for client in cohort.clients]
    return present + [past_id(past.client) for past in cohort.history]


@dataclass(frozen=True)
class CohortAdmission:
    """Admits the updates of one round, and the rows that stand in for absent clients."""

    engine: GramEngine
    history: History | None  # None: no row of the history is used
    context: AdmissionContext
    detail: Detail  # of the inner products that the rule reads
    round_number: int

    def admit(
        self,
        clients: Sequence[str],
        reports: Mapping[str, Report],
        past_clients: Callable[[int], list[str]],
    ) -> AdmittedCohort:
        """Return the cohort of these clients as the rule sees it.

        `past_clients` returns the clients whose rows of the history the rule would use, given how
        many updates are admitted.
        """
        values = self._reported_values(clients, [reports[client] for client in clients])
        decision = judge(values, self.context)
        admitted = np.flatnonzero(~decision.rejected)
        present = [clients[index] for index in admitted.tolist()]
        past_rows, past_decision = self._stand_ins(
            _without(past_clients(len(present)), present), values
        )
        present_reports = [
            _admitted_report(reports[clients[index]], decision, index)
            for index in admitted.tolist()
        ]
        factors = np.concatenate(
            [decision.factors[admitted], past_decision.factors[~past_decision.rejected]]
        )
        cohort = self._cohort(present, present_reports, past_rows)
        cohort = replace(cohort, gram=cohort.gram.scaled(factors))
        return AdmittedCohort(cohort, factors, decision.findings + past_decision.findings)

    def _cohort(
        self, present: list[str], reports: list[Report], past_rows: list[PastRow]
    ) -> Cohort:
        order = [update_id(client) for client in present]
        order += [past_id(past.client) for past in past_rows]
        self.engine.arrange(order)
        return Cohort(
            gram=self.engine.gram(order, self.detail),
            clients=present,
            reports=reports,
            round=self.round_number,
            history=past_rows,
            known_clients=len(self.history) if self.history else 0,
        )

    def _reported_values(self, clients: Sequence[str], reports: Sequence[Report]) -> ReportedValues:
        return ReportedValues(
            clients,
            self.engine.norms([update_id(client) for client in clients]),
            np.array([report.loss for report in reports], np.float64),
            np.array([report.samples for report in reports], np.float64),
            [self.context.losses.recent(client) for client in clients],
        )

    def _stand_ins(
        self, clients: Sequence[str], present: ReportedValues
    ) -> tuple[list[PastRow], AdmissionDecision]:
        """Return the admitted rows of the history of these clients, and the decision about all.

        The limits of this round apply to them: a row may have missed its own round, or come from
        a round without limits.
        """
        rows, norms = list[PastRow](), np.zeros(0)
        if self.history:
            past_rows = self.history.rows()
            rows = [past_rows[client] for client in clients]
            self._add_past(self.history, clients)
            norms = self.engine.norms([past_id(client) for client in clients])
        losses = np.array([-np.inf if row.loss is None else row.loss for row in rows])
        samples = np.array([row.samples or 0.0 for row in rows])
        values = ReportedValues(clients, norms, losses, samples)
        decision = judge_stand_ins(values, present, self.context)
        admitted = [
            _admitted_row(row, decision, index)
            for index, row in enumerate(rows)
            if not decision.rejected[index]
        ]
        return admitted, decision

    def _add_past(self, history: History, clients: Sequence[str]) -> None:
        """Multiply the rows of the history that the engine does not have yet."""
        rows = {past_id(client): history.row(client) for client in clients}
        self.engine.extend(
            {row_id: row for row_id, row in rows.items() if row_id not in self.engine}
        )


def _without(clients: Sequence[str], present: Sequence[str]) -> list[str]:
    present_set = set(present)
    return [client for client in clients if client not in present_set]


def _admitted_report(report: Report, decision: AdmissionDecision, index: int) -> Report:
    loss, samples = float(decision.losses[index]), float(decision.samples[index])
    if loss == report.loss and samples == report.samples:
        return report
    return replace(report, loss=loss, samples=samples)


def _admitted_row(row: PastRow, decision: AdmissionDecision, index: int) -> PastRow:
    loss = None if row.loss is None else float(decision.losses[index])
    samples = None if row.samples is None else float(decision.samples[index])
    return replace(row, loss=loss, samples=samples)
