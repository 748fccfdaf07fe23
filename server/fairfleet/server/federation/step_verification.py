"""The verification of a step: which clients try it, what they answer, and the verdict.

Answers are stored with the digest of their step. A restarted server computes the same step again,
and selects only clients that have not answered yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from fairfleet.common.codecs import needs
from fairfleet.common.errors import BadRequest
from fairfleet.server.federation.clients.feature_requirements import (
    NO_REQUIREMENTS,
    FeatureRequirements,
)
from fairfleet.server.federation.clients.sessions import ClientDescription, Sessions
from fairfleet.server.federation.staged_model import StepProposal
from fairfleet.server.rounds.verification import StepVerdict, VerificationPolicy, decide, speaks
from fairfleet.server.rules import Report
from fairfleet.server.storage.round_record import VerificationRecord

Answer = tuple[float, ...] | None  # a loss per trial; None: the client could not try the step


class StepVerification:
    """A step that clients try, with their answers."""

    def __init__(self, proposal: StepProposal, answers: dict[str, Answer]) -> None:
        self.proposal = proposal
        # Answers from before a restart may fit other settings.
        self._answers = {
            client: answer
            for client, answer in answers.items()
            if answer is None or self._fits(answer)
        }
        self._began = time.monotonic()

    @property
    def step(self) -> bytes:
        """The digest of the step."""
        return self.proposal.publication.digest

    def to_ask(
        self,
        participants: Iterable[str],
        sessions: Sessions,
        codec: str,
        requirements: FeatureRequirements = NO_REQUIREMENTS,
    ) -> frozenset[str]:
        """Return the participants that may be able to try the step and have not answered.

        Those that are not connected may be able to. `codec` is that of the step as it is sent.
        """
        connected = {
            client: sessions.get(client) for client in participants if client not in self._answers
        }
        return frozenset(
            client
            for client, session in connected.items()
            if session is None
            or (can_try(session.member, codec) and requirements.allow(session.member, "verify"))
        )

    def check(self, client: str, losses: Sequence[float]) -> None:
        """Raise BadRequest unless there is a possible loss for each trial."""
        impossible = sum(math.isnan(loss) or loss == -math.inf for loss in losses)
        if not self._fits(losses) or impossible:
            raise BadRequest(
                f"client {client} tried a step and sent {len(losses)} losses, {impossible} of them "
                f"NaN or -inf; expected {self.proposal.trials.halvings + 1} numbers, +inf where a "
                "trial diverged"
            )

    def _fits(self, losses: Sequence[float]) -> bool:
        """Return whether there is one loss for each trial of this step."""
        return len(losses) == self.proposal.trials.halvings + 1

    def take(self, client: str, answer: Answer) -> None:
        """Accept a client's answer."""
        self._answers[client] = answer

    @property
    def participants(self) -> Mapping[str, Report]:
        """The clients whose updates made the step, with their reports as admitted."""
        return self.proposal.result.step.reports

    def verdict(self, policy: VerificationPolicy) -> StepVerdict:
        """Return how much of the step to take, according to the answers so far."""
        before = {client: report.loss for client, report in self.participants.items()}
        answers = {
            client: answer
            for client, answer in self._answers.items()
            if answer is not None and client in before
        }
        return decide(self.proposal.trials, policy, before, answers, self.proposal.rate)

    def record(self, verdict: StepVerdict, participants: Iterable[str]) -> VerificationRecord:
        """Return what is kept of the verification."""
        answered = {
            client
            for client, answer in self._answers.items()
            if answer is not None and speaks(answer)
        }
        trials = self.proposal.trials
        return VerificationRecord(
            outcome=verdict.outcome,
            reason=verdict.reason,
            factor=trials.factor(verdict.halvings),
            tried=tuple(trials.factor(halvings) for halvings in range(trials.halvings + 1)),
            improved=tuple(verdict.improved),
            answered=tuple(sorted(answered)),
            silent=tuple(sorted(set(participants) - answered)),
            seconds=time.monotonic() - self._began,
        )


def can_try(member: ClientDescription, codec: str) -> bool:
    """Return whether a client can try a step that is sent with this codec."""
    return member.verifies and needs(codec) <= set(member.codecs)
