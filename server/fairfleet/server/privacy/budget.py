"""The federation's privacy budget: what was released of each client so far, and its epsilon.

Everything that a client announces is recorded before it is received, with the noise that it really
has: an update that comes too late, or whose round is never committed, was released all the same.
The record is durable. A result with less noise than the server now requires is refused: the server
may have been restarted with more noise since it gave out the task.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

from fairfleet.common.errors import UsageError, WrongState
from fairfleet.common.names import round_name
from fairfleet.common.privacy import NO_TERMS, PrivacyTerms, model_refusal, shortfall
from fairfleet.common.privacy_costs import largest_cost
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.privacy import accountant, release_queries
from fairfleet.server.privacy.accountant import PrivacySpent, SampledRelease
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.rules import Recipe
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.store import Store


class PrivacyBudget:
    """Records every release, and compares the total with the limit."""

    def __init__(self, store: Store, privacy: PrivacySettings, recipe: Recipe) -> None:
        accountant.check_library()
        self.privacy = privacy
        self._store = store
        self._required = privacy.terms(recipe) or NO_TERMS
        # At most: a client reports its loss on the initial model once.
        self._release_cost = privacy.released_cost(recipe) + privacy.initial_loss_cost(recipe)
        release_queries.make_table(store)
        current = store.current_round().number
        self._refuse_unprotected_past(current)
        self._noised_since = release_queries.noised_since(
            store, current, noised=self._required.reports is not None
        )
        self._costs = release_queries.costs(store)
        self._draws = release_queries.draws(store)
        stored = release_queries.kept_divergences(store, accountant.method())
        for draw, divergences in stored.items():
            accountant.remember(draw, divergences)
        self._largest_cost = (
            math.inf
            if privacy.max_epsilon is None
            else largest_cost(privacy.max_epsilon, privacy.delta)
        )
        self._lock = threading.Lock()  # the database's thread adds, the event loop reads
        self._cached: tuple[PrivacySpent, float] | None = None  # the newest result of `epsilon`

    def _refuse_unprotected_past(self, current: int) -> None:
        if why := model_refusal(self._store.signature()):
            raise UsageError(f"this model cannot be trained with privacy: {why}")
        before = release_queries.unprotected_rounds(self._store, at_the_client=self.privacy.local)
        before += (
            release_queries.unprotected_updates(self._store, current) if self.privacy.local else 0
        )
        if before:
            raise UsageError(
                f"{self._store.folder} holds rounds or updates without privacy at the "
                f"{self.privacy.where}, which no epsilon covers. Restore the former privacy "
                "settings to continue, or start again: use a new --state-dir and a model that was "
                "not trained on these clients' data."
            )

    # ---- releases ------------------------------------------------------------------------------

    def refuse_weaker_update(self, client: str, applied: PrivacyTerms) -> None:
        """Raise WrongState for an update with less privacy than the server now requires."""
        if why := shortfall(applied, self._required):
            raise WrongState(
                f"the update of {client} {why} as this server now requires (or the client is too "
                "old to report what it did). Request a new task, and train again."
            )

    def refuse_weaker_evaluation(self, client: str, applied: PrivacyTerms) -> None:
        """Raise WrongState for an evaluation with less privacy than the server now requires."""
        if why := shortfall(applied, PrivacyTerms(reports=self._required.reports)):
            raise WrongState(
                f"the evaluation of {client} {why} as this server now requires. Request a new task."
            )

    def update_announced(
        self,
        client: str,
        round_number: int,
        digest: bytes,
        applied: PrivacyTerms,
        report: TrainReport,
    ) -> None:
        """Record the release of an update before a byte of it is received.

        Must run in the database's thread.
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
        what = digest.hex() if self.privacy.local else f"report {digest.hex()}"
        self._release(round_number, client, what, self.privacy.cost_of(applied, values))

    def evaluation_reported(
        self, client: str, version: int, evaluation: Evaluation, applied: PrivacyTerms
    ) -> None:
        """Record the release of an evaluation, in the database's thread.

        The same values again are no new release; other values are, even if they come too late.
        """
        what = f"evaluation {sha256(evaluation.model_dump_json().encode()).hexdigest()[:16]}"
        self._release(version, client, what, self.privacy.evaluation_cost_of(applied))

    def _release(self, round_number: int, client: str, what: str, cost: float) -> None:
        if not cost and not self.privacy.local:
            return
        if release_queries.release(self._store, round_number, client, what, cost):
            self._add([client], cost)

    def _add(self, clients: Iterable[str], cost: float) -> None:
        with self._lock:
            self._costs |= {client: self._costs.get(client, 0.0) + cost for client in clients}

    def draw(self, drawn: int, among: int) -> SampledRelease | None:
        """Return what a round of secretly drawn clients counts as; None without amplification."""
        return (
            self.privacy.draw(drawn, among)
            if self.privacy.amplification and drawn < among
            else None
        )

    def commit_writes(
        self, round_number: int, clients: Sequence[str], draw: SampledRelease | None
    ) -> list[Write]:
        """Return the writes that record a round's release with its commit."""
        cost = self.privacy.commit_cost
        return (
            [release_queries.commit_write(round_number, list(clients), cost, draw)] if cost else []
        )

    def committed(self, clients: Sequence[str], draw: SampledRelease | None) -> None:
        """Add a committed round to the total in memory."""
        cost = self.privacy.commit_cost
        if cost and draw is not None:
            self._draws = {**self._draws, draw: self._draws.get(draw, 0) + 1}
        elif cost:
            self._add(clients, cost)

    # ---- epsilon -------------------------------------------------------------------------------

    def unknown(self, *draws: SampledRelease | None) -> list[SampledRelease]:
        """Return the draws, released or given, whose divergences must be computed first."""
        # Without noise, epsilon is infinite and needs no divergences.
        noised = {draw for draw in (*self._draws, *draws) if draw is not None and draw.multiplier}
        return [draw for draw in noised if not accountant.is_known(draw)]

    def keep(self, draw: SampledRelease, divergences: Sequence[float]) -> None:
        """Store computed divergences, in the database's thread."""
        release_queries.keep_divergences(self._store, draw, accountant.method(), divergences)

    def draw_of_next(self, drawn: int, among: int) -> SampledRelease | None:
        """Return the draw whose divergences `reason_to_end` needs, or None."""
        return None if self.privacy.max_epsilon is None else self.draw(drawn, among)

    @property
    def spent(self) -> PrivacySpent:
        """What was released of the client with the largest total."""
        with self._lock:
            return PrivacySpent(max(self._costs.values(), default=0.0), self._draws)

    def epsilon(self) -> float:
        """Return epsilon of the client with the largest total."""
        spent = self.spent
        if self._cached is None or self._cached[0] != spent:
            self._cached = (spent, accountant.epsilon(spent, self.privacy.delta))
        return self._cached[1]

    # ---- clients that have spent their budget --------------------------------------------------

    @property
    def retires_clients(self) -> bool:
        """Whether clients stop one by one. A random draw is spent by all clients together."""
        return self.privacy.max_epsilon is not None and not self.privacy.amplification

    def may_train(self, client: str) -> bool:
        """Return whether what is left of a client's budget suffices for another round."""
        cost = self._release_cost + self.privacy.evaluation_cost + self.privacy.commit_cost
        return not self.retires_clients or self._cost_of(client) + cost <= self._largest_cost

    def may_evaluate(self, client: str) -> bool:
        """Return whether what is left of a client's budget suffices for an evaluation."""
        cost = self.privacy.evaluation_cost
        if not self.retires_clients or not cost:
            return True
        return self._cost_of(client) + cost <= self._largest_cost

    def obstacle(self, client: str) -> str:
        """Return why the client is not selected to train any more; empty if it can be."""
        if self.may_train(client):
            return ""
        return (
            f"its privacy budget is spent: epsilon {self.epsilon_of(client):.2f} of "
            f"{self.privacy.max_epsilon:g}, and another round could exceed it"
        )

    def epsilon_of(self, client: str) -> float:
        """Return epsilon of one client."""
        spent = PrivacySpent(self._cost_of(client), self._draws)
        return accountant.epsilon(spent, self.privacy.delta)

    def _cost_of(self, client: str) -> float:
        with self._lock:
            return self._costs.get(client, 0.0)

    def too_few_left(
        self, connected: Iterable[str], gone: Collection[str], minimum: int
    ) -> str | None:
        """Return why too few clients can still train; None if enough can, or none is exhausted.

        Clients that took part before count as well, since they can return; those in `gone` do not.
        """
        with self._lock:
            known = self._costs.keys() | set(connected)
        left = [client for client in known if client not in gone and self.may_train(client)]
        spent = sum(not self.may_train(client) for client in known)
        if len(left) >= minimum or not spent:
            return None
        return (
            f"{spent} of {len(known)} clients have spent their privacy budget: another round could "
            f"exceed epsilon {self.privacy.max_epsilon:g}. {len(left)} can still train, and a "
            f"round needs {minimum}"
        )

    def too_many_retired(
        self,
        connected: Iterable[str],
        retired: Collection[str],
        revoked: Collection[str],
        minimum: int,
    ) -> str:
        """Return why no round can begin after clients' owners retired them; empty if one can.

        Clients that are away count as able to train, since they can return.
        """
        with self._lock:
            known = (self._costs.keys() | set(connected) | set(retired)) - set(revoked)
        left = [client for client in known if client not in retired and self.may_train(client)]
        own = sum(client in retired for client in known)
        if len(left) >= minimum or not own:
            return ""
        return (
            f"{own} of {len(known)} clients have retired, by their owners' limits on epsilon; "
            f"{len(left)} can still train, and a round needs {minimum}. Rounds begin again when "
            "other clients join, or when an owner gives a larger --max-epsilon"
        )

    def exhausted(self) -> set[str]:
        """Return the clients that are not selected to train any more."""
        with self._lock:
            clients = list(self._costs)
        return {client for client in clients if not self.may_train(client)}

    def reason_to_end(self, drawn: int, among: int) -> str | None:
        """Return why a random draw of another round would exceed the budget; None if it would not.

        The round would select `drawn` clients `among` those connected.
        """
        limit, draw = self.privacy.max_epsilon, self.draw(drawn, among)
        if limit is None:
            return None
        cost = (
            self._release_cost
            + self.privacy.evaluation_cost
            + (0.0 if draw else self.privacy.commit_cost)
        )
        after = accountant.epsilon(self.spent.plus(cost, draw), self.privacy.delta)
        if after <= limit:
            return None
        return (
            f"another round could spend epsilon {after:.2f}, and {limit:g} is allowed; "
            f"{self.epsilon():.2f} is spent"
        )

    def status(self) -> pb.PrivacyStatus:
        """Return the state of the budget for operators."""
        settings = self.privacy
        return pb.PrivacyStatus(
            epsilon=self.epsilon(),
            delta=settings.delta,
            where=settings.where,
            clip=settings.clip,
            noise_multiplier=settings.noise_multiplier,
            max_epsilon=settings.max_epsilon,
            against=settings.against,
            not_covered=settings.not_covered + self._unnoised_past,
        )

    @property
    def _unnoised_past(self) -> str:
        return (
            f"; nor what was reported before {round_name(self._noised_since)}"
            if self._noised_since
            else ""
        )
