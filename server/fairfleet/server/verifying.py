"""A step that is being tried: who is asked, what they answered, and what is decided in the end.

Answers are durable, with the digest of the step that they speak of: a server that was restarted makes the same step
again, and asks only those who have not answered yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairfleet.common.codecs import needs
from fairfleet.common.errors import BadRequest
from fairfleet.server.committing import Proposal
from fairfleet.server.rules import Report
from fairfleet.server.sessions import Member, Sessions
from fairfleet.server.verification import Terms, Verdict, decide, speaks

Found = tuple[float, ...] | None  # a loss per trial; None: the client could not


class Verifying:
    def __init__(self, proposal: Proposal, answers: dict[str, Found]) -> None:
        self.proposal = proposal
        # From before a restart, perhaps with other settings, and those that come.
        self._answers = {client: found for client, found in answers.items() if found is None or self._fits(found)}
        self._began = time.monotonic()

    @property
    def step(self) -> bytes:
        """Its digest."""
        return self.proposal.publication.digest

    def to_ask(self, participants: Iterable[str], sessions: Sessions, codec: str) -> frozenset[str]:
        """Whoever may be able to and has not answered; of those who are not connected nobody knows.

        `codec` is the one in which the step is sent.
        """
        connected = {client: sessions.get(client) for client in participants if client not in self._answers}
        return frozenset(
            client for client, session in connected.items() if session is None or can_try(session.member, codec)
        )

    def check(self, client: str, losses: Sequence[float]) -> None:
        impossible = sum(math.isnan(loss) or loss == -math.inf for loss in losses)
        if not self._fits(losses) or impossible:
            raise BadRequest(
                f"client {client} tried a step and sent {len(losses)} losses, {impossible} of them NaN or -inf; "
                f"expected {self.proposal.trials.halvings + 1} numbers, +inf where a trial diverged"
            )

    def _fits(self, losses: Sequence[float]) -> bool:
        """One for each trial of this step."""
        return len(losses) == self.proposal.trials.halvings + 1

    def take(self, client: str, found: Found) -> None:
        self._answers[client] = found

    @property
    def participants(self) -> Mapping[str, Report]:
        """Whose updates the step is made of, with what was admitted of their reports."""
        return self.proposal.made.taken.reports

    def verdict(self, terms: Terms) -> Verdict:
        before = {client: report.loss for client, report in self.participants.items()}
        answers = {client: found for client, found in self._answers.items() if found is not None and client in before}
        return decide(self.proposal.trials, terms, before, answers, self.proposal.rate)

    def record(self, verdict: Verdict, participants: Iterable[str]) -> dict[str, Any]:
        answered = {client for client, found in self._answers.items() if found is not None and speaks(found)}
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


def can_try(member: Member, codec: str) -> bool:
    return member.verifies and needs(codec) <= set(member.codecs)
