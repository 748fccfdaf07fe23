"""The owner's limit on epsilon, and what each release of a client costs.

Every release is charged to the ledger before it is sent. A release that would exceed the limit is
not sent, whatever the server requests. Numbers that are reported without noise are not covered by
epsilon; the ledger and the log say so.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_hex

from fairfleet.client.privacy.ledger import FILE, UNPROTECTED, LedgerEntry, ReleaseLedger
from fairfleet.common.errors import FleetError, UsageError
from fairfleet.common.privacy import PrivacyTerms
from fairfleet.common.privacy_costs import gaussian_epsilon, report_cost, update_cost
from fairfleet.common.reports import Evaluation, TrainReport

log = logging.getLogger(__name__)


class PrivacyBudgetSpent(FleetError):
    """Another release would exceed the epsilon that the owner of this machine allows."""

    exit_code = 0


@dataclass(frozen=True)
class Allowance:
    """Charges releases to the ledger, up to the owner's limit."""

    ledger: ReleaseLedger
    max_epsilon: float | None = None  # None: no limit
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.max_epsilon is not None and self.ledger.is_incomplete:
            log.warning(
                "this client took part before, and has no ledger of that (%s): what it released "
                "then does not count towards --max-epsilon. If the file was lost, restore it",
                FILE,
            )

    @property
    def epsilon(self) -> float:
        """Epsilon of everything that was released so far."""
        return gaussian_epsilon(self.ledger.total, self.delta)

    def require_update(self, terms: PrivacyTerms) -> None:
        """Raise before a training whose update could not be sent.

        PrivacyBudgetSpent is raised if the limit would be exceeded, UsageError if the server
        requests updates without noise, of which no number can stay below a limit.
        """
        if self.max_epsilon is None:
            return
        if not terms.noise_multiplier:
            raise UsageError(
                "the server requests updates without noise, and this client has a limit "
                f"(--max-epsilon {self.max_epsilon:g}) that no such update can keep. The server's "
                "operator can set privacy.where: client; or leave --max-epsilon out here."
            )
        self._check(self.ledger.total + _update_cost(terms, values=1))

    def require_evaluation(self, terms: PrivacyTerms) -> None:
        """Raise PrivacyBudgetSpent before an evaluation that could not be sent."""
        if terms.reports:
            self._check(self.ledger.total + report_cost(terms.reports.noise_multiplier, 1))

    def charge_update(
        self,
        federation: str,
        round_number: int,
        digest: str,
        terms: PrivacyTerms,
        report: TrainReport,
    ) -> None:
        """Record an update, with its report, before it is announced.

        Raises PrivacyBudgetSpent if it must not be sent.
        """
        values = sum(
            value is not None
            for value in (
                report.loss_before,
                report.gradient_norm,
                report.accuracy,
                report.initial_loss,
            )
        )
        what = _digest(digest + report.model_dump_json()) if terms.noise_multiplier else UNPROTECTED
        cost = _update_cost(terms, values)
        self._charge(LedgerEntry(federation, "update", round_number, what, cost))
        if terms.reports is None:
            self._charge(LedgerEntry(federation, "report", round_number, UNPROTECTED, 0.0))

    def charge_evaluation(
        self, federation: str, version: int, evaluation: Evaluation, terms: PrivacyTerms
    ) -> None:
        """Record an evaluation before it is reported; raise PrivacyBudgetSpent if it must not be.

        Each call is charged, because each evaluation gets noise of its own, and limits on the
        result can make two of them equal. Without noise it is not covered by epsilon, and
        recorded once.
        """
        if terms.reports is None:
            self._charge(LedgerEntry(federation, "evaluation", version, UNPROTECTED, 0.0))
            return
        values = sum(value is not None for value in (evaluation.loss, evaluation.accuracy))
        cost = report_cost(terms.reports.noise_multiplier, values)
        self._charge(LedgerEntry(federation, "evaluation", version, token_hex(16), cost))

    def charge_trial(self, federation: str, round_number: int) -> None:
        """Record losses of a proposed step, which never have noise."""
        self._charge(LedgerEntry(federation, "trial", round_number, UNPROTECTED, 0.0))

    def _charge(self, release: LedgerEntry) -> None:
        is_new = self.ledger.record(release, self._check)
        if is_new and release.what == UNPROTECTED and self.max_epsilon is not None:
            log.warning(
                "%ss of this client go to the server without noise: epsilon does not cover them",
                release.kind,
            )

    def _check(self, total: float) -> None:
        if self.max_epsilon is None:
            return
        epsilon = gaussian_epsilon(total, self.delta)
        if epsilon > self.max_epsilon:
            raise PrivacyBudgetSpent(
                f"epsilon {self.epsilon:.2f} of the {self.max_epsilon:g} that its owner allows is "
                f"spent (delta {self.delta:g}), and another release would make it "
                f"{_words(epsilon)}. A larger --max-epsilon lets this client take part again."
            )


def _update_cost(terms: PrivacyTerms, values: int) -> float:
    """Return the cost of an update with so many reported numbers.

    Numbers without noise cost nothing here, because epsilon does not cover them.
    """
    reports = terms.reports
    reported = report_cost(reports.noise_multiplier, values) if reports else 0.0
    return update_cost(terms.noise_multiplier) + reported


def _words(epsilon: float) -> str:
    return f"{epsilon:.2f}" if math.isfinite(epsilon) else "infinite"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]
