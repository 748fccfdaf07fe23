"""A round's result between aggregation and commit, and the files written for it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairfleet.common.codecs import is_predicted
from fairfleet.common.tensors import Model
from fairfleet.server.aggregation.admission import AdmissionFinding
from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.aggregation.conflict_map import ConflictMap
from fairfleet.server.aggregation.diagnostics import Diagnostics
from fairfleet.server.aggregation.results import AggregatedStep, ServerState
from fairfleet.server.aggregation.stored_state import dump_state
from fairfleet.server.rules import PastRow, Report, StepTrials
from fairfleet.server.storage.files.history_files import DurableHistory
from fairfleet.server.storage.files.tensor_files import NO_METADATA, model_file, vectors_file
from fairfleet.server.storage.quarantine import QuarantinedUpdate, keep_files
from fairfleet.server.storage.round_record import Contribution, RoundRecord
from fairfleet.server.storage.store import Store, StoredModel, StoredUpdate
from fairfleet.server.transfer.downlink import DOWNLINK, Change, Downlink
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.published_model import PublishedModel

Updates = Mapping[str, tuple[StoredUpdate, Model]]  # complete updates with their rows, by client
NO_CHANGE = Change(None, None)


@dataclass(frozen=True)
class StagedModel:
    """A model that can be sent and is being written to disk; one transaction commits it."""

    stored: StoredModel
    written: Future[float]  # done when its files are on the disk, with the seconds that it took
    model: Model
    publication: PublishedModel
    state: ServerState
    record: RoundRecord
    diagnostics_json: str  # of the record, encoded once for all who watch
    remembered: tuple[StoredUpdate, ...] = ()  # stand for their clients in the history
    forgotten: tuple[PastRow, ...] = ()  # rows whose files are deleted after the commit
    change: Change = NO_CHANGE  # from the version before
    conflict_map: ConflictMap | None = None
    quarantined: tuple[QuarantinedUpdate, ...] = ()


@dataclass(frozen=True)
class StagedRound:
    """A round's result in the committer's spare memory: the next model, or a step to try first."""

    step: AggregatedStep
    change: Change
    trials: StepTrials | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # see AggregationResult


@dataclass(frozen=True)
class AggregationResult:
    """What the rule and the optimizer made of a round's updates."""

    aggregation: Aggregation
    reports: Mapping[str, Report]
    step: AggregatedStep
    left_out: Mapping[str, str]  # clients whose updates could not be used, with the reason


@dataclass(frozen=True)
class StepProposal:
    """A step for participants to try. It stays in the committer's memory until it is decided."""

    result: AggregationResult
    trials: StepTrials
    change: Change  # the longest change, as it is sent
    seconds: float  # that aggregation took

    @property
    def publication(self) -> PublishedModel:
        """The change as clients download it."""
        assert self.change.publication is not None
        return self.change.publication

    @property
    def rate(self) -> float:
        """The length of the step over that of the rule's direction."""
        return self.result.step.rate


class ModelWriter:
    """Begins to write a round's model to disk, with everything that its commit names."""

    def __init__(
        self,
        store: Store,
        downlink: Downlink,
        history: DurableHistory | None,
        bases: PredictionBases | None,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> None:
        """`metadata` is written to the file of each model."""
        self._store, self._downlink, self._metadata = store, downlink, metadata
        self._history, self._bases = history, bases

    def begin(
        self,
        version: int,
        model: Model,
        result: AggregationResult,
        updates: Updates,
        change: Change,
        seconds: float,
        workers: Executor,
    ) -> StagedModel:
        """Begin to write a version and its state; `seconds` is how long aggregation took."""
        publishing = workers.submit(PublishedModel.of, version, model, self._downlink.steady)
        numbers, vectors = dump_state(result.step.state)
        if change.residual is not None:
            vectors = {**vectors, DOWNLINK: change.residual}
        written: Future[float] = workers.submit(self._write, version, model, vectors)
        remembered, evicted = self._remember(version, result, updates)
        quarantined = self._quarantine(result, updates)
        self._write_bases(version - 1, updates)
        publication = publishing.result()
        record = new_record(publication, result, updates, seconds, len(evicted))
        file = vectors_file(version) if vectors else None
        return StagedModel(
            StoredModel(version, publication.digest, model_file(version), numbers, file),
            written,
            model,
            publication,
            result.step.state,
            record,
            json.dumps(record.diagnostics),
            tuple(update for update in remembered if update.client not in evicted),
            tuple(self._history.unneeded()) if self._history else (),
            change,
            result.step.diagnostics.conflict_map,
            quarantined,
        )

    def _remember(
        self, version: int, result: AggregationResult, updates: Updates
    ) -> tuple[list[StoredUpdate], Collection[str]]:
        """Write the round's rows to the history; return their updates and the evicted clients.

        This precedes the commit: the commit names the files, and frees the memory of the rows.
        """
        rows = {client: updates[client][1].parameters for client in result.step.reports}
        remembered = result.aggregation.remember(rows, result.reports)
        evicted = self._history.make_room(version) if self._history else []
        return [updates[client][0] for client in remembered], evicted

    def _quarantine(
        self, result: AggregationResult, updates: Updates
    ) -> tuple[QuarantinedUpdate, ...]:
        """Keep the files of updates that could not be used."""
        unusable = {
            client: (updates[client][0], reason) for client, reason in result.left_out.items()
        }
        return keep_files(self._store, unusable)

    def _write(self, version: int, model: Model, vectors: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        self._store.files.write_model(version, model, self._metadata)
        self._store.files.write_vectors(version, vectors)
        return time.perf_counter() - start

    def _write_bases(self, round_number: int, updates: Updates) -> None:
        """Keep the updates that clients may delta-code their next ones against."""
        if self._bases:
            predicted = {
                client: (update.digest, row.parameters)
                for client, (update, row) in updates.items()
                if is_predicted(update.codec)
            }
            self._bases.write(round_number, predicted)


def new_record(
    publication: PublishedModel,
    result: AggregationResult,
    updates: Updates,
    seconds: float,
    evicted: int,
) -> RoundRecord:
    """Return a round's record, as far as aggregation determines it."""
    diagnostics = result.step.diagnostics
    counted = {client: updates[client] for client in result.step.reports}
    return RoundRecord(
        round=publication.version - 1,
        digest=publication.digest,
        contributions=_contributions(counted, diagnostics),
        promised=_promised(diagnostics),
        diagnostics=diagnostics.record(),
        unix_seconds=time.time(),
        admission=(*result.step.findings, *_quarantine_findings(result.left_out)),
        bytes_received=sum(update.size_bytes for update, _ in updates.values()),
        aggregation_seconds=seconds,
        history_evicted=evicted,
    )


def _contributions(updates: Updates, diagnostics: Diagnostics) -> tuple[Contribution, ...]:
    """Return the clients of a round with the weight that the rule gave them."""
    return tuple(
        Contribution(client, _weight(diagnostics, client), update.report)
        for client, (update, _) in updates.items()
    )


def _quarantine_findings(left_out: Mapping[str, str]) -> list[AdmissionFinding]:
    """Return a finding for each update that aggregation failed with, given the reasons."""
    return [
        AdmissionFinding(client, "aggregation", "quarantined", 0.0, 0.0, reason=reason)
        for client, reason in sorted(left_out.items())
    ]


def _promised(diagnostics: Diagnostics) -> float | None:
    """Return the share of clients whose loss falls to first order along the rule's direction.

    Whether it fell is another question: a step has a length, and an optimizer may change its
    direction.
    """
    slopes = list(diagnostics.predicted_decrease.values())
    return sum(slope > 0 for slope in slopes) / len(slopes) if slopes else None


def _weight(diagnostics: Diagnostics, client: str) -> float:
    """Return the client's coefficient: its mean over layers that differ, 0 if the rule has none."""
    return float(np.mean(diagnostics.coefficients.get(client, 0.0)))
