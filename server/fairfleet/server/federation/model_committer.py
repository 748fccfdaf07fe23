"""From a round's updates to the next committed model: rule, optimizer, disk, and bytes to send.

What takes long (`multiply`, `aggregate`) runs in a thread of its own, one call at a time. Nothing
here is visible to anyone until the round runner has committed it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from fairfleet.common.errors import Bug, StateDirError
from fairfleet.common.names import round_name
from fairfleet.common.tensors import Model, add_change
from fairfleet.common.training_plan import LossMeasurement
from fairfleet.server.aggregation.admission import OFF, AdmissionContext, AdmissionSettings
from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.aggregation.arriving_rows import ArrivingRows
from fairfleet.server.aggregation.conflict_map import ConflictMap
from fairfleet.server.aggregation.diagnostics import Diagnostics, DiagnosticsSetting
from fairfleet.server.aggregation.finite import check_model, check_state, model_is_finite
from fairfleet.server.aggregation.history import HistorySettings
from fairfleet.server.aggregation.isolation import Attempt, most_conspicuous
from fairfleet.server.aggregation.participation import ParticipationBook
from fairfleet.server.aggregation.report_requirements import ReportRequirements
from fairfleet.server.aggregation.results import AggregatedStep, ServerState
from fairfleet.server.aggregation.rule_loss import LossOfRule
from fairfleet.server.aggregation.staging import layer_sizes, stage_step, uses_history
from fairfleet.server.aggregation.stored_state import load_state, read_model, state_numbers
from fairfleet.server.aggregation.usable_updates import UsableUpdates, conspicuous_values
from fairfleet.server.federation.staged_model import (
    AggregationResult,
    ModelWriter,
    StagedModel,
    StagedRound,
    StepProposal,
    Updates,
)
from fairfleet.server.privacy.settings import ServerNoise
from fairfleet.server.rounds.verification import VerificationPolicy
from fairfleet.server.rules import PastRow, Recipe, Report
from fairfleet.server.storage.client_queries import (
    first_losses,
    initial_losses,
    loss_history,
    update_counts,
)
from fairfleet.server.storage.files.checksummed_arrays import load_vectors
from fairfleet.server.storage.files.history_files import DurableHistory
from fairfleet.server.storage.store import Store, StoredUpdate
from fairfleet.server.transfer.downlink import DOWNLINK, Change, Downlink
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.published_model import PublishedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommitterOptions:
    """How models are made and sent, apart from the rule."""

    history: HistorySettings = field(default_factory=HistorySettings)
    codec: str = "raw32"  # of the changes that are sent to clients
    changes: int = 4  # changes that are kept for clients with an older model
    model_codec: str = "raw32"  # of whole models
    admission: AdmissionSettings = OFF
    noise: ServerNoise | None = None
    bases: PredictionBases | None = None  # None: updates are not delta-coded
    diagnostics: DiagnosticsSetting = "auto"
    measurement: LossMeasurement = "batches"  # of reported losses: the least exact that suffices
    rule_loss: LossOfRule = "before"  # the loss that the rule receives: before or after training
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the files of models


DEFAULT_OPTIONS = CommitterOptions()


class ModelCommitter:
    """Holds the newest model and the state of rule and optimizer; makes the next from updates."""

    def __init__(
        self,
        store: Store,
        recipe: Recipe,
        model: Model,
        publication: PublishedModel,
        state: ServerState,
        downlink: Downlink,
        options: CommitterOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.model, self.publication, self.downlink = model, publication, downlink
        self.conflict_map: ConflictMap | None = None  # of the newest round
        self._store, self._recipe, self._state, self._options = store, recipe, state, options
        self.rule_loss: LossOfRule = options.rule_loss
        self._requirements = ReportRequirements.of_recipe(
            recipe, options.measurement, options.rule_loss
        )
        self._layers = layer_sizes(model.signature, recipe.rule.blocks())
        self._past: DurableHistory | None = None
        if uses_history(recipe):
            self._past = DurableHistory(store, self._layers, options.history, options.rule_loss)
        self._load_reports(publication.version)
        self._spare = Model.empty(model.signature)  # the next model is made in it
        clip = options.noise.clip if options.noise else None
        self._rows = ArrivingRows(self._new_aggregation, clip)
        self._writer = ModelWriter(store, downlink, self._past, options.bases, options.metadata)

    @classmethod
    def open(
        cls,
        store: Store,
        version: int,
        recipe: Recipe,
        options: CommitterOptions = DEFAULT_OPTIONS,
    ) -> ModelCommitter:
        """Load a committed version; raise StateDirError if its file is missing or damaged."""
        stored = store.model(version)
        if stored is None:
            raise StateDirError(
                f"{store.folder} has no model of version {version}; restore it from a backup"
            )
        model = read_model(store.folder / stored.file)
        vectors = load_vectors(store.folder / stored.vectors_file) if stored.vectors_file else {}
        residual = vectors.pop(DOWNLINK, None)
        downlink = Downlink(options.codec, options.changes, residual, options.model_codec)
        publication = PublishedModel.of(version, model, downlink.steady)
        if publication.digest != stored.digest:
            raise StateDirError(
                f"{store.folder / stored.file} is damaged: its digest is "
                f"{publication.digest.hex()[:16]}…, the database says "
                f"{stored.digest.hex()[:16]}…. Restore the state directory from a backup."
            )
        state = load_state(stored.rule_state, recipe, vectors)
        return cls(store, recipe, model, publication, state, downlink, options)

    def _load_reports(self, version: int) -> None:
        counts = {client: n for client, (n, _) in update_counts(self._store, version).items()}
        initial = self._recipe.rule.needs().initial_loss
        first = (initial_losses if initial else first_losses)(self._store)
        self._participation = ParticipationBook(first, counts, initial=initial)
        self._losses = loss_history(self._store, version, self.rule_loss)

    # ---- history -------------------------------------------------------------------------------

    def past_rows(self) -> list[PastRow]:
        """Return which rows the history holds."""
        return list(self._past.history.rows().values()) if self._past else []

    def wants_late(self, client: str, round_number: int, ahead: int = 0) -> bool:
        """Return whether an update that missed its round would be kept in the history.

        `ahead` is the number of commits until the update arrives there.
        """
        return self._past is not None and self._past.wants(
            client, round_number, self.publication.version + ahead
        )

    def remember_late(self, update: StoredUpdate, row: Model) -> None:
        """Write a late update's row to disk; a transaction must name it next."""
        assert self._past is not None
        self._past.write_late(update, row.parameters)

    def late_is_named(self, update: StoredUpdate) -> None:
        """Use a late row from now on: a transaction has named it."""
        assert self._past is not None
        self._past.late_is_named(update)
        if self._rows.aggregation is None:  # otherwise when the round is committed
            self._past.settle()

    def shut_out(self, client: str) -> None:
        """Forget a revoked client: its past must not influence later rounds."""
        if self._past:
            self._past.shut_out(client)

    def has_participated(self, client: str) -> bool:
        """Return whether an update of the client was part of a committed round."""
        return client in self._participation.participations

    def lacks_initial_loss(self, client: str, round_number: int) -> bool:
        """Return whether a client should measure its loss on the initial model in this round."""
        return self._participation.lacks_initial_loss(client, round_number)

    # ---- the round under way -------------------------------------------------------------------

    def withdraw(self, client: str) -> None:
        """Remove the update of a client that was revoked while its round is being collected.

        Runs in the aggregator's thread, which also multiplies.
        """
        self._rows.withdraw(client)

    def add(self, client: str, row: Model, selected: Iterable[str]) -> None:
        """Accept a complete update; `multiply` will use its row."""
        self._rows.add(client, row.parameters, selected)

    def multiply(self) -> None:
        """Compute the inner products of rows that arrived, while other clients still train."""
        self._rows.multiply()

    def _new_aggregation(self, expected: Sequence[str]) -> Aggregation:
        aggregation = Aggregation(
            self._recipe,
            self._layers,
            round_number=self.publication.version,
            history=self._past.history if self._past else None,
            expected=expected,
            admission=AdmissionContext(self._options.admission, self._losses),
            diagnostics=self._options.diagnostics,
        )
        for client in self._past.revoked() if self._past else ():
            aggregation.withdraw(client)
        return aggregation

    def aggregate(
        self,
        updates: Updates,
        workers: Executor,
        policy: VerificationPolicy | None = None,
        selected: Collection[str] = (),
    ) -> StagedModel | StepProposal:
        """Return the next model; or a step to try first, if the policy or the rule wants it.

        `selected` are all clients that were selected in the round: the level of its diagnostics
        depends on their number.
        """
        start = time.perf_counter()
        self.multiply()
        aggregation = self._rows.aggregation
        assert aggregation is not None, "a round is aggregated only with updates in it"
        aggregation.expect(selected)
        if aggregation.clients != set(updates):
            raise Bug(
                f"round {self.publication.version} has updates of {sorted(updates)}, "
                f"but rows of {sorted(aggregation.clients)}"
            )
        reports = {client: self._report(update) for client, (update, _) in updates.items()}
        staged = self._stage_usable(aggregation, updates, reports, policy)
        result = AggregationResult(aggregation, reports, staged.step, staged.left_out)
        seconds = time.perf_counter() - start
        if staged.trials is not None:
            return StepProposal(result, staged.trials, staged.change, seconds)
        return self._begin_writing(result, updates, staged.change, seconds, workers)

    def _stage_usable(
        self,
        aggregation: Aggregation,
        updates: Updates,
        reports: Mapping[str, Report],
        policy: VerificationPolicy | None,
    ) -> StagedRound:
        """Stage the round with all usable updates; keep the model if no update is usable."""
        unusable = self._unusable_reports(updates)
        usable = {client: update for client, update in updates.items() if client not in unusable}
        values = conspicuous_values(
            {client: update.report for client, (update, _) in usable.items()},
            {client: row.buffers for client, (_, row) in usable.items()},
            aggregation.norms(list(usable)).tolist(),
            self._participation.first_losses,
            self.rule_loss,
        )
        search = UsableUpdates(
            self.publication.version,
            lambda attempt: self._stage(aggregation, reports, updates, attempt, policy),
            unusable,
        )
        suspects = most_conspicuous(list(usable), values)
        success = search.stage(suspects, has_history=self._past is not None)
        staged, left_out = success or (self._unchanged(), search.reasons(usable))
        return replace(staged, left_out=left_out)

    def _unusable_reports(self, updates: Updates) -> dict[str, str]:
        """Return clients whose stored report does not meet what the rule needs, with the reasons.

        New reports are refused when they are announced; these were stored by an older version or
        under another rule.
        """
        problems = {
            client: self._requirements.problem(update.report)
            for client, (update, _) in updates.items()
        }
        return {client: problem for client, problem in problems.items() if problem}

    def _stage(
        self,
        aggregation: Aggregation,
        reports: Mapping[str, Report],
        updates: Updates,
        attempt: Attempt,
        policy: VerificationPolicy | None,
    ) -> StagedRound:
        """Stage the next model, or a step to try, in the spare memory; raise unless finite."""
        noise, version = self._options.noise, self.publication.version + 1
        staged = stage_step(
            aggregation,
            reports,
            self.model,
            self._spare,
            state=ServerState() if attempt.fresh_state else self._state,
            trained={client: row for client, (_, row) in updates.items()},
            halvings=policy.halvings if policy else None,
            add_noise=noise.apply if noise else None,
            attempt=attempt,
        )
        step = staged.step
        if attempt.fresh_state:
            step = replace(step, diagnostics=_with_note(step.diagnostics, "state_reset", True))
        if not attempt.with_history and self._past is not None:
            noted = _with_note(step.diagnostics, "history_left_out", True)
            step = replace(step, diagnostics=noted)
        if staged.trials is not None:
            change = self.downlink.propose(self._spare, version)
        else:
            change = self.downlink.publish(self.model, self._spare, version)
        if self.downlink.is_lossy:
            check_model(self._spare)
        residual = {} if change.residual is None else {DOWNLINK: change.residual}
        check_state(state_numbers(step.state), residual)
        return StagedRound(step, change, staged.trials)

    def _unchanged(self) -> StagedRound:
        """Stage the current model as the next one; rule and optimizer forget the round."""
        self._spare.overwrite(self.model)
        change = self.downlink.publish(self.model, self._spare, self.publication.version + 1)
        diagnostics = Diagnostics.empty(self._recipe.name, "no_usable_update")
        return StagedRound(AggregatedStep(self._spare.parameters, self._state, diagnostics), change)

    def take(
        self, proposal: StepProposal, halvings: int | None, updates: Updates, workers: Executor
    ) -> StagedModel:
        """Take 2^-halvings of a proposed step; with None, the next model is the current one.

        Without a step, rule and optimizer forget the round; the history keeps its updates.
        """
        step, start = proposal.result.step, time.perf_counter()
        if halvings is not None:
            add_change(self.model, self._spare, halvings, out=self._spare)
            if not model_is_finite(self._spare):
                name = round_name(self.publication.version)
                log.error("%s keeps the model: the chosen step leaves float32", name)
                step, halvings = replace(step, diagnostics=_without_step(step.diagnostics)), None
        if halvings is None:
            self._spare.overwrite(self.model)
            step = replace(step, state=self._state)
        rounding = self.downlink.rounded(self._spare) if halvings is not None else None
        change = self.downlink.shorten(proposal.change, halvings, rounding)
        seconds = proposal.seconds + time.perf_counter() - start
        result = replace(proposal.result, step=step)
        return self._begin_writing(result, updates, change, seconds, workers)

    # ---- commit --------------------------------------------------------------------------------

    def _begin_writing(
        self,
        result: AggregationResult,
        updates: Updates,
        change: Change,
        seconds: float,
        workers: Executor,
    ) -> StagedModel:
        """Begin to write the model in the spare memory, and everything that belongs to it."""
        version = self.publication.version + 1
        return self._writer.begin(version, self._spare, result, updates, change, seconds, workers)

    def adopt(self, staged: StagedModel, updates: Updates) -> None:
        """Make a staged model the newest one: it was committed."""
        reports = {client: self._report(update) for client, (update, _) in updates.items()}
        losses = {client: report.loss for client, report in reports.items()}
        self._participation.committed(reports)
        self._losses.committed(losses)
        self._spare, self.model, self.publication = self.model, staged.model, staged.publication
        self._state = staged.state
        self._rows.clear()
        self.downlink.adopt(staged.change)
        self.conflict_map = staged.conflict_map
        if self._past:
            self._past.settle()
        if self._options.bases:
            self._options.bases.settle()

    def _report(self, update: StoredUpdate) -> Report:
        return self._participation.report_of(
            update.client, update.round, update.report, self.rule_loss
        )


def _with_note(diagnostics: Diagnostics, name: str, value: Any) -> Diagnostics:
    return diagnostics.model_copy(update={"notes": {**diagnostics.notes, name: value}})


def _without_step(diagnostics: Diagnostics) -> Diagnostics:
    """Mark a round whose step could not be taken after all."""
    return diagnostics.model_copy(update={"status": "step_not_finite"})
