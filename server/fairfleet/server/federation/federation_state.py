"""A read-only view of the running federation, for monitoring and for operators.

Everything is read at the moment of the call, on the event loop. Nothing here changes the
federation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Set

from fairfleet.common.reports import Better
from fairfleet.common.tensors import Signature
from fairfleet.proto.v1.operator_pb2 import Event
from fairfleet.server.aggregation.conflict_map import ConflictMap
from fairfleet.server.federation.background import loop_time
from fairfleet.server.federation.clients.client_book import ClientBook
from fairfleet.server.federation.clients.sessions import Session
from fairfleet.server.federation.round_commit import RoundCommits
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.federation.staged_model import StepProposal
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.rules import PastRow, Recipe
from fairfleet.server.security.request_limits import RequestLimits
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.kept_versions import KeptVersions
from fairfleet.server.storage.round_record import RoundRecord
from fairfleet.server.transfer.counters import TrafficCounters
from fairfleet.server.transfer.downlink import Downlink
from fairfleet.server.transfer.published_model import PublishedModel


class FederationState:
    """What may be read of a running federation."""

    def __init__(
        self,
        runner: RoundRunner,
        commits: RoundCommits,
        settings: ServerSettings,
        recipe: Recipe,
        traffic: TrafficCounters,
        limits: RequestLimits,
        book: ClientBook,
    ) -> None:
        self.settings, self.recipe, self.traffic, self.book = settings, recipe, traffic, book
        self.federation_id = runner.store.federation_id
        self.signature: Signature = runner.store.signature()
        self._runner, self._commits, self._limits = runner, commits, limits
        self._started = loop_time()

    # ---- the process ---------------------------------------------------------------------------

    @property
    def uptime_seconds(self) -> float:
        """Seconds since this run of the server began."""
        return loop_time() - self._started

    @property
    def stopping(self) -> bool:
        """Whether the server is shutting down."""
        return self._runner.stopping

    @property
    def has_failed(self) -> bool:
        """Whether an error of the server itself is about to end it."""
        return self._runner.background.failed.done()

    def watch(self) -> AsyncIterator[Event]:
        """Return all events from this call on."""
        return self._runner.events.watch()

    def refusal_counts(self) -> dict[str, int]:
        """Return how many calls were refused since the start, by reason."""
        return self._limits.refusals.counts()

    # ---- the round and its models --------------------------------------------------------------

    @property
    def round(self) -> Round:
        """The round under way."""
        return self._runner.round

    @property
    def rounds_planned(self) -> int:
        """The number of rounds after which the federation ends."""
        return self._runner.policy.rounds

    @property
    def finished_reason(self) -> str:
        """Why the federation is finished; empty if it is not."""
        return self.round.stopping if self.round.phase is Phase.FINISHED else ""

    @property
    def publication(self) -> PublishedModel:
        """The newest committed model, as it is sent."""
        return self._runner.committer.publication

    @property
    def downlink(self) -> Downlink:
        """The changes between versions that can be sent instead of a model."""
        return self._runner.committer.downlink

    @property
    def proposal(self) -> StepProposal | None:
        """The step that clients are trying, or None."""
        return self._runner.verification.proposal if self._runner.verification else None

    @property
    def newest_record(self) -> RoundRecord | None:
        """The record of the newest round that this run of the server committed."""
        return self._commits.newest_record

    @property
    def kept_versions(self) -> KeptVersions:
        """The versions whose models are on the disk."""
        return self._runner.kept_versions

    @property
    def under_evaluation(self) -> int | None:
        """The version that clients evaluate at present; None if they evaluate none."""
        return self._runner.under_evaluation

    @property
    def best_version(self) -> int | None:
        """The best version of those whose evaluation is over and that are kept; or None."""
        return self._runner.best_version

    @property
    def result(self) -> PublishedModel | None:
        """The model that the federation ended with; None before clients may learn of the end."""
        return self._runner.result

    @property
    def initial_model(self) -> PublishedModel | None:
        """Version 0, if clients have to measure their loss on it; else None."""
        return self._runner.initial_model

    @property
    def conflict_map(self) -> ConflictMap | None:
        """The conflict map of the newest round.

        It is None if the round was too large or if an earlier run of the server committed it.
        """
        return self._runner.committer.conflict_map

    @property
    def privacy_budget(self) -> PrivacyBudget | None:
        """The privacy budget, or None in a federation without differential privacy."""
        return self._runner.privacy_budget

    @property
    def rows_evicted(self) -> int:
        """How many rows the history has evicted since the start."""
        return self._commits.rows_evicted

    def past_rows(self) -> list[PastRow]:
        """Return which rows the history holds."""
        return self._runner.committer.past_rows()

    # ---- evaluations ---------------------------------------------------------------------------

    @property
    def measure(self) -> str:
        """The measure by which versions are compared; empty while it is not known."""
        return self._runner.scheduler.scores.measure

    def direction_of(self, measure: str) -> Better:
        """Return which values of a measure are better."""
        return self._runner.scheduler.scores.direction_of(measure)

    @property
    def held_because(self) -> str:
        """Why no round begins although no operator paused; empty if rounds may begin."""
        return self._runner.held_because if self._runner.is_held else ""

    # ---- clients -------------------------------------------------------------------------------

    @property
    def revoked(self) -> Set[str]:
        """The revoked clients."""
        return self._runner.revoked.keys()

    @property
    def connected(self) -> int:
        """How many clients are connected."""
        return len(self._runner.sessions)

    def sessions(self) -> list[Session]:
        """Return the sessions of all connected clients."""
        return self._runner.sessions.all()

    def is_connected(self, client: str) -> bool:
        """Return whether a client has a session."""
        return self._runner.sessions.get(client) is not None

    def was_told_of_end(self, client: str) -> bool:
        """Return whether a client was told that the federation is finished."""
        session = self._runner.sessions.get(client)
        if session is not None:
            return session.finished
        is_over = self._runner.round.phase is Phase.FINISHED
        return is_over and self._runner.sessions.left_at_the_end(client) is True

    def has_left(self, client: str) -> bool:
        """Return whether a client was here since the server's start, and is not any more."""
        return self._runner.sessions.left_at_the_end(client) is not None

    def activity(self, client: str) -> str:
        """Return the kind of the client's task ("train", "evaluate", "verify"); "" if idle."""
        return self._runner.assignments.activity(client)

    def missing_clients(self) -> int:
        """Return how many more clients must connect before a round can begin."""
        return self._runner.scheduler.missing_clients(self.round, self.sessions())

    def missing_features(self, session: Session) -> list[str]:
        """Return the features that the federation's tasks require and this client lacks."""
        return self._runner.requirements.missing(session.member)

    def not_selected_because(self, session: Session) -> str:
        """Return why a connected client is not selected for some tasks; empty if it can be."""
        return self._runner.obstacle(session)

    @property
    def retired(self) -> Mapping[str, str]:
        """The clients that their owners retired, with the reason."""
        return self._runner.retired

    @property
    def exhausted(self) -> Set[str]:
        """The clients whose privacy budget here is spent."""
        return self.privacy_budget.exhausted() if self.privacy_budget else frozenset()
