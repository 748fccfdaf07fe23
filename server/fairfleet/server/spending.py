"""The federation's privacy budget: what was released of each client so far, and what that amounts to.

Everything that a client announces is written down before it is taken, at what was really done to it, whatever becomes
of it later: an update that comes too late, or whose round is never committed, was released all the same. What restarts
find is on the disk. What had less done to it than is asked for by now is refused: the server may have been restarted
with more noise since its task was given out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from hashlib import sha256

from fairfleet.common.errors import UsageError, WrongState
from fairfleet.common.privacy import NO_TERMS, Terms, shortfall
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server import accounting, privacy_records
from fairfleet.server.accounting import Draw, Spent
from fairfleet.server.facts import Write
from fairfleet.server.privacy import PrivacySettings, model_refusal
from fairfleet.server.rules import Recipe
from fairfleet.server.store import Store


class Spending:
    def __init__(self, store: Store, privacy: PrivacySettings, recipe: Recipe) -> None:
        accounting.check_library()
        self.privacy = privacy
        self._store = store
        self._wanted = privacy.terms(recipe) or NO_TERMS
        self._release_cost = privacy.released_cost(recipe)
        privacy_records.make_table(store)
        current = store.current_round().number
        self._refuse_what_is_not_covered(current)
        self._noised_since = privacy_records.noised_since(store, current, noised=self._wanted.reports is not None)
        self._costs = privacy_records.costs(store)
        self._draws = privacy_records.draws(store)
        self._lock = threading.Lock()  # the database's thread adds, the event loop reads
        self._known: tuple[Spent, float] | None = None

    def _refuse_what_is_not_covered(self, current: int) -> None:
        if why := model_refusal(self._store.signature()):
            raise UsageError(f"privacy cannot be had here: {why}")
        before = privacy_records.unprotected_rounds(self._store, at_the_client=self.privacy.local)
        before += privacy_records.unprotected_updates(self._store, current) if self.privacy.local else 0
        if before:
            raise UsageError(
                f"{self._store.folder} holds rounds or updates without privacy at the {self.privacy.where}, which no "
                "epsilon covers. Leave privacy as it was to go on as before, or begin anew: a new --state-dir, with a "
                "model that has not seen their data."
            )

    # ---- what is released ----------------------------------------------------------------------

    def refuse_weaker_update(self, client: str, made: Terms) -> None:
        if why := shortfall(made, self._wanted):
            raise WrongState(
                f"the update of {client} {why} as this server asks by now (or the client is too old to say what it "
                "did). Ask for a new task, and train again."
            )

    def refuse_weaker_evaluation(self, client: str, made: Terms) -> None:
        if why := shortfall(made, Terms(reports=self._wanted.reports)):
            raise WrongState(f"the evaluation of {client} {why} as this server asks by now. Ask for a new task.")

    def update_announced(self, client: str, round_number: int, digest: bytes, made: Terms, report: TrainReport) -> None:
        """In the database's thread, before a byte of it is taken."""
        values = sum(value is not None for value in (report.loss_before, report.gradient_norm, report.accuracy))
        what = digest.hex() if self.privacy.local else f"report {digest.hex()}"
        self._release(round_number, client, what, self.privacy.cost_of(made, values))

    def evaluation_reported(self, client: str, version: int, evaluation: Evaluation, made: Terms) -> None:
        """The same values again are no new release; others are, even if they come too late to be of use."""
        what = f"evaluation {sha256(evaluation.model_dump_json().encode()).hexdigest()[:16]}"
        self._release(version, client, what, self.privacy.evaluation_cost_of(made))

    def _release(self, round_number: int, client: str, what: str, cost: float) -> None:
        if not cost and not self.privacy.local:
            return
        if privacy_records.release(self._store, round_number, client, what, cost):
            self._add([client], cost)

    def _add(self, clients: Iterable[str], cost: float) -> None:
        with self._lock:
            self._costs |= {client: self._costs.get(client, 0.0) + cost for client in clients}

    def draw(self, drawn: int, among: int) -> Draw | None:
        """What a round counts as, whose clients were drawn by a lot that nobody knows."""
        return self.privacy.draw(drawn, among) if self.privacy.amplification and drawn < among else None

    def commit_writes(self, round_number: int, clients: Sequence[str], draw: Draw | None) -> list[Write]:
        cost = self.privacy.commit_cost
        return [privacy_records.commit_write(round_number, list(clients), cost, draw)] if cost else []

    def committed(self, clients: Sequence[str], draw: Draw | None) -> None:
        cost = self.privacy.commit_cost
        if cost and draw is not None:
            self._draws = {**self._draws, draw: self._draws.get(draw, 0) + 1}
        elif cost:
            self._add(clients, cost)

    # ---- what it amounts to --------------------------------------------------------------------

    @property
    def spent(self) -> Spent:
        with self._lock:
            return Spent(max(self._costs.values(), default=0.0), self._draws)

    def epsilon(self) -> float:
        """Of the client of whom most was released."""
        spent = self.spent
        if self._known is None or self._known[0] != spent:
            self._known = (spent, accounting.epsilon(spent, self.privacy.delta))
        return self._known[1]

    def reason_to_end(self, drawn: int, among: int) -> str | None:
        """Whether one more round, of so many clients among those who are here, could spend more than is allowed."""
        limit, draw = self.privacy.max_epsilon, self.draw(drawn, among)
        if limit is None:
            return None
        cost = self._release_cost + self.privacy.evaluation_cost + (0.0 if draw else self.privacy.commit_cost)
        after = accounting.epsilon(self.spent.plus(cost, draw), self.privacy.delta)
        if after <= limit:
            return None
        return f"another round could spend epsilon {after:.2f}, and {limit:g} is allowed; {self.epsilon():.2f} is spent"

    def status(self) -> pb.PrivacyStatus:
        told = self.privacy
        return pb.PrivacyStatus(
            epsilon=self.epsilon(),
            delta=told.delta,
            where=told.where,
            clip=told.clip,
            noise_multiplier=told.noise_multiplier,
            max_epsilon=told.max_epsilon,
            against=told.against,
            not_covered=told.not_covered + self._not_noised_before,
        )

    @property
    def _not_noised_before(self) -> str:
        return f"; nor what was reported before round {self._noised_since}" if self._noised_since else ""
