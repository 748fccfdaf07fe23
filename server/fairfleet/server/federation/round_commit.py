"""Commits a round: one transaction stores its model, its record and everything that names them.

The transaction comes last: it may name only files that are on the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fairfleet.common.names import round_name
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.aggregation.diagnostics import Diagnostics
from fairfleet.server.federation.event_stream import record_message, step_measured_message
from fairfleet.server.federation.operators.effective_settings import settings_digest
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.federation.staged_model import StagedModel
from fairfleet.server.privacy.accountant import SampledRelease
from fairfleet.server.rounds import state_machine
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.improvement import ImprovementReport, ImprovementTracker
from fairfleet.server.storage.operations.undone_rounds import going_back_write, returns
from fairfleet.server.storage.quarantine import (
    QuarantinedUpdate,
    named_files,
    notices,
    quarantine_write,
)
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.round_record import PrivacyRelease, RoundRecord
from fairfleet.server.storage.store import StoredModel, StoredUpdate

log = logging.getLogger(__name__)


class RoundCommits:
    """Commits staged models, and holds what the newest commits mean for clients and monitoring."""

    improvement: ImprovementTracker

    def __init__(self, runner: RoundRunner, settings: ServerSettings) -> None:
        self._rule = settings.rule.name
        self.newest_record: RoundRecord | None = None  # committed by this run of the server
        self.rows_evicted = 0  # from the history, since the start
        # By client, until a later update of it counts.
        self.quarantine_notices: dict[str, QuarantinedUpdate] = {}
        self._runner = runner
        self._keep_models, self._settings_digest = settings.keep_models, settings_digest(settings)
        self._quarantine_bytes = settings.limits.quarantine_bytes

    async def open(self, round_number: int) -> None:
        """Load what earlier commits left in the state directory."""
        store, in_database = self._runner.store, self._runner.executors.in_database
        await self._clear_quarantine()
        await in_database(self._runner.kept_versions.reload)
        self.quarantine_notices = await in_database(notices, store)
        self.improvement = await in_database(ImprovementTracker, store, round_number)

    async def commit(self, staged: StagedModel, training_seconds: float) -> None:
        """Commit a model, and remove files that are no longer needed."""
        runner = self._runner
        async with runner.lock:
            released = await self._commit(staged, training_seconds)
        await runner.upload_registry.cleared_away()
        if staged.quarantined:
            await self._clear_quarantine()
        retire = runner.store.files.retire_round
        await runner.executors.in_worker(retire, staged.stored.version, released)

    async def commit_again(
        self, stored: StoredModel, from_version: int, event: state_machine.Continued, *writes: Write
    ) -> None:
        """Commit an earlier version once more, as the newest; its files are on the disk.

        Only the database changes. The caller holds the lock, and loads everything else anew.
        """
        runner, store = self._runner, self._runner.store
        before = runner.round
        after, _ = state_machine.step(before, event, runner.policy)
        record = self._record_of_return(stored, from_version)
        returned = await runner.executors.in_database(returns, store)
        pinned = runner.kept_versions.pinned()
        released = runner.kept_versions.commit(stored.version, pinned)
        writes = (
            *writes,
            going_back_write(before.number, from_version, returned),
            store.commit_writes(stored, lambda: record, self._keep_models, pinned),
            runner.clock.write(),
        )
        await runner.executors.in_database(store.record, [(before, event, after)], after, *writes)
        await runner.executors.in_worker(store.files.retire_round, stored.version, released)

    def _record_of_return(self, stored: StoredModel, from_version: int) -> RoundRecord:
        """Return the record of a round that trained nothing, and went back to a version."""
        budget = self._runner.privacy_budget
        diagnostics = Diagnostics.empty(self._rule, "went_back")
        noted = diagnostics.model_copy(update={"notes": {"from_version": from_version}})
        return RoundRecord(
            round=stored.version - 1,
            digest=stored.digest,
            contributions=(),
            diagnostics=noted.record(),
            unix_seconds=time.time(),
            privacy=PrivacyRelease(budget.privacy.where, drawn=False) if budget else None,
            settings_digest=self._settings_digest,
        )

    async def _clear_quarantine(self) -> None:
        executors, store = self._runner.executors, self._runner.store
        files = await executors.in_database(named_files, store)
        await executors.in_worker(store.files.clear_quarantine, files)

    async def _commit(self, staged: StagedModel, training_seconds: float) -> list[int]:
        """Commit a model; return the versions whose files are not kept any more."""
        runner = self._runner
        draw = await self._draw()
        record = self._record(staged, training_seconds, draw)
        updates = [update for update, _ in runner.upload_registry.complete_updates.values()]
        writes = self._model_writes(staged)
        # The transaction also selects the next round's clients, which depends on these counts.
        writes += self._count_release(draw)
        report = self._count_updates(updates)

        def complete_record() -> RoundRecord:
            """Wait until the model's files are on the disk."""
            return replace(record, commit_seconds=staged.written.result())

        writes += report.writes
        pinned = runner.kept_versions.pinned()
        released = runner.kept_versions.commit(staged.stored.version, pinned)
        writes.append(
            runner.store.commit_writes(staged.stored, complete_record, self._keep_models, pinned)
        )

        def announcements() -> Iterator[dict[str, Any]]:
            if report.measured:
                yield {"step_measured": step_measured_message(report.measured)}
            message = record_message(complete_record(), staged.diagnostics_json)
            yield {"round_committed": pb.RoundCommitted(record=message)}

        await runner.apply(
            state_machine.ModelStored(staged.stored.version),
            writes=writes,
            announcements=announcements(),
            early=staged.publication if self._may_be_sent_early(staged) else None,
            publish=lambda: self._publish(staged, updates, complete_record()),
        )
        return released

    # ---- the transaction -----------------------------------------------------------------------

    async def _draw(self) -> SampledRelease | None:
        """Return what the round counts as for privacy; None if its clients were not sampled."""
        runner = self._runner
        if runner.privacy_budget is None:
            return None
        draw = runner.privacy_budget.draw(*runner.scheduler.lot_of(runner.round))
        await runner.compute_divergences(draw)
        return draw

    def _record(
        self, staged: StagedModel, training_seconds: float, draw: SampledRelease | None
    ) -> RoundRecord:
        """Return the round's record, apart from how long its commit takes."""
        round_, budget = self._runner.round, self._runner.privacy_budget
        release = PrivacyRelease(budget.privacy.where, drawn=draw is not None) if budget else None
        return replace(
            staged.record,
            dropped=tuple(sorted(round_.lost)),
            attempts=round_.attempt + 1,
            training_seconds=training_seconds,
            surplus=tuple(sorted(round_.surplus)),
            privacy=release,
            settings_digest=self._settings_digest,
        )

    def _model_writes(self, staged: StagedModel) -> list[Write]:
        store, registry = self._runner.store, self._runner.upload_registry
        rule_loss = self._runner.committer.rule_loss
        writes = [
            store.history_write(staged.remembered, staged.forgotten, rule_loss),
            quarantine_write(staged.quarantined, self._quarantine_bytes),
        ]
        if not registry.durable:
            # An update with a file is in the database already: the server had another setting of
            # `durability` until it was restarted in this round.
            complete = [update for update, _ in registry.complete_updates.values()]
            writes += [store.update_write(update) for update in complete if update.file is None]
        return writes

    def _count_release(self, draw: SampledRelease | None) -> list[Write]:
        """Count the round in the privacy budget; return the writes that record it."""
        runner = self._runner
        if runner.privacy_budget is None:
            return []
        clients = sorted(runner.upload_registry.complete_updates)
        writes = runner.privacy_budget.commit_writes(runner.round.number, clients, draw)
        runner.privacy_budget.committed(clients, draw)
        return writes

    def _count_updates(self, updates: Sequence[StoredUpdate]) -> ImprovementReport:
        """Count the round's updates for selection; return what they show about earlier steps."""
        round_ = self._runner.round
        self._runner.scheduler.counted(updates)
        self._runner.scheduler.spared(round_.surplus, round_.number)
        return self.improvement.committed(round_.number, updates, sorted(round_.late))

    def _may_be_sent_early(self, staged: StagedModel) -> bool:
        """Return whether the model may be sent before it is committed.

        It may not if clients can have it in a shorter form, or if its release must be recorded
        first.
        """
        shorter = staged.change.publication or staged.publication.compact
        return shorter is None and self._runner.privacy_budget is None

    # ---- after the transaction -----------------------------------------------------------------

    def _publish(
        self, staged: StagedModel, updates: Sequence[StoredUpdate], record: RoundRecord
    ) -> None:
        """Make the committed model visible, and free the memory of its round."""
        runner = self._runner
        runner.verification = runner.early_publication = None
        runner.committer.adopt(staged, runner.upload_registry.complete_updates)
        runner.upload_registry.clear(staged.stored.version, runner.keeps_late)
        self._note_quarantined(staged.quarantined, [update.client for update in updates])
        self.rows_evicted += record.history_evicted
        self.newest_record = record

    def _note_quarantined(
        self, quarantined: Sequence[QuarantinedUpdate], clients: Iterable[str]
    ) -> None:
        for client in clients:
            self.quarantine_notices.pop(client, None)
        for update in quarantined:
            self.quarantine_notices[update.client] = update
            log.warning(
                "%s continues without the update of %s: %s",
                round_name(update.round),
                update.client,
                update.reason,
                extra={"round": update.round, "client": update.client},
            )
