"""A step that is being tried: who is asked, what they answered, and what is decided in the end.

Answers are durable, with the digest of the step that they speak of: a server that was restarted makes the same step
again, and asks only those who have not answered yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from fairfleet.common.errors import BadRequest
from fairfleet.server.committing import Proposal
from fairfleet.server.round_records import Updates
from fairfleet.server.sessions import Sessions
from fairfleet.server.verification import Terms, Verdict, decide

Found = tuple[float, ...] | None  # a loss per trial; None: the client could not


class Verifying:
    def __init__(self, proposal: Proposal, answers: dict[str, Found]) -> None:
        self.proposal = proposal
        self._answers = answers  # from before a restart, and those that come
        self._began = time.monotonic()

    @property
    def step(self) -> bytes:
        """Its digest."""
        return self.proposal.publication.digest

    def to_ask(self, participants: Iterable[str], sessions: Sessions) -> frozenset[str]:
        """Whoever may be able to and has not answered; of those who are not connected nobody knows."""
        connected = {client: sessions.get(client) for client in participants if client not in self._answers}
        return frozenset(client for client, session in connected.items() if session is None or session.member.verifies)

    def check(self, client: str, losses: Sequence[float]) -> None:
        wanted = self.proposal.trials.halvings + 1
        if len(losses) != wanted or any(math.isnan(loss) for loss in losses):
            raise BadRequest(
                f"client {client} tried a step and sent {len(losses)} losses, {sum(map(math.isnan, losses))} of them "
                f"NaN; expected {wanted} numbers, infinite where a trial diverged"
            )

    def take(self, client: str, found: Found) -> None:
        self._answers[client] = found

    def verdict(self, updates: Updates, terms: Terms) -> Verdict:
        before = {client: update.report.loss_before for client, (update, _) in updates.items()}
        answers = {client: found for client, found in self._answers.items() if found is not None and client in before}
        return decide(self.proposal.trials, terms, before, answers, self.proposal.rate)

    def record(self, verdict: Verdict, participants: Iterable[str]) -> dict[str, Any]:
        answered = {client for client, found in self._answers.items() if found is not None}
        trials = self.proposal.trials
        return {
            "outcome": verdict.outcome,
            "reason": verdict.reason,
            "factor": trials.factor(verdict.halvings),
            "tried": [trials.factor(halvings) for halvings in range(trials.halvings + 1)],
            "improved": list(verdict.improved),
            "answered": sorted(answered),
            "silent": sorted(set(participants) - answered),
            "seconds": time.monotonic() - self._began,
        }
