"""From a round's updates to the next committed model: rule, optimizer, disk, and the bytes to be sent.

What takes long (`multiply`, `aggregate`) runs in one thread of its own, one call at a time. Nothing here is
visible to anyone until the coordinator has committed it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.codecs import is_predicted
from fairfleet.common.errors import Bug, FleetError, StateDirError
from fairfleet.common.tensors import Model, Section, Signature, Vector, add_change
from fairfleet.server.admission import OFF, RECENT, Admission, Gate, Watched
from fairfleet.server.aggregation import Aggregation, ServerState, Taken
from fairfleet.server.bases import Bases
from fairfleet.server.client_records import first_losses, losses_at_start, recent_losses, update_counts
from fairfleet.server.conflict_map import ConflictMap
from fairfleet.server.downlink import DOWNLINK, Change, Downlink
from fairfleet.server.durable_history import Past
from fairfleet.server.optimizers import OptimizerState
from fairfleet.server.privacy import Disguised
from fairfleet.server.publication import Publication
from fairfleet.server.round_records import Updates, admission_record, record_of
from fairfleet.server.rules import Recipe, Report
from fairfleet.server.rules.base import PastRow, Trials
from fairfleet.server.sealed import load_vectors
from fairfleet.server.settings import HistorySettings
from fairfleet.server.store import Store, StoredModel, StoredUpdate
from fairfleet.server.tensor_files import model_file, vectors_file
from fairfleet.server.verification import Terms

DEFAULT_HISTORY = HistorySettings()
NO_CHANGE = Change(None, None)


@dataclass(frozen=True)
class Committed:
    """A model that is ready to be sent, and on its way to the disk; it becomes the federation's by one transaction."""

    stored: StoredModel
    written: Future[float]  # done when its files are on the disk: in so many seconds
    model: Model
    publication: Publication
    state: ServerState
    record: dict[str, Any]
    diagnostics_json: str  # of the record, for those who watch
    remembered: tuple[StoredUpdate, ...] = ()  # stand for their clients in the history
    forgotten: tuple[PastRow, ...] = ()  # rows whose files go once this is committed
    change: Change = NO_CHANGE  # from the version before
    conflict_map: ConflictMap | None = None


@dataclass(frozen=True)
class Made:
    """What rule and optimizer made of a round's updates."""

    aggregation: Aggregation
    reports: Mapping[str, Report]
    taken: Taken
    began: float  # by the performance counter


@dataclass(frozen=True)
class Proposal:
    """A step for participants to try. It lies in the committer's memory until one of its lengths is taken."""

    made: Made
    trials: Trials
    change: Change  # as it is sent: the longest
    seconds: float  # that it took

    @property
    def publication(self) -> Publication:
        assert self.change.publication is not None
        return self.change.publication

    @property
    def rate(self) -> float:
        return self.made.taken.rate


class Committer:
    """Holds the newest model, and what rule and optimizer remember. Turns a round's rows into the next."""

    def __init__(
        self,
        store: Store,
        recipe: Recipe,
        model: Model,
        publication: Publication,
        state: ServerState,
        keeping: HistorySettings,
        downlink: Downlink,
        admission: Admission = OFF,
        privacy: Disguised | None = None,
        bases: Bases | None = None,
    ) -> None:
        self.downlink = downlink
        self._bases = bases  # none: updates are told by themselves
        self._privacy = privacy
        self.model = model
        self.publication = publication
        self._store = store
        self._recipe = recipe
        self._state = state
        self._layers = layer_sizes(model.signature)
        self._past = Past(store, self._layers, keeping) if uses_history(recipe) else None
        self._first_losses = first_losses(store)
        version, self._admission = publication.version, admission
        self._watched = Watched(losses_at_start(store, version), recent_losses(store, version, RECENT))
        before = update_counts(store, version)
        self._participations = {client: count for client, (count, _) in before.items()}
        self.conflict_map: ConflictMap | None = None  # of the newest round
        self._spare = Model.empty(model.signature)  # the next model is made in it; the two take turns
        self._aggregation: Aggregation | None = None
        self._expected: frozenset[str] = frozenset()
        self._arrived: deque[tuple[str, Vector]] = deque()

    @classmethod
    def open(
        cls,
        store: Store,
        version: int,
        recipe: Recipe,
        keeping: HistorySettings = DEFAULT_HISTORY,
        codec: str = "raw32",
        changes: int = 4,
        model_codec: str = "raw32",
        admission: Admission = OFF,
        privacy: Disguised | None = None,
        bases: Bases | None = None,
    ) -> Committer:
        """`codec` is that of changes, of which so many are kept; `model_codec` is that of whole models."""
        stored = store.model(version)
        if stored is None:
            raise StateDirError(f"{store.folder} has no model of version {version}; restore it from a backup")
        model = read_model(store.folder / stored.file)
        vectors = load_vectors(store.folder / stored.vectors_file) if stored.vectors_file else {}
        downlink = Downlink(codec, changes, vectors.pop(DOWNLINK, None), model_codec)
        publication = Publication.of(version, model, downlink.steady)
        if publication.digest != stored.digest:
            raise StateDirError(
                f"{store.folder / stored.file} is damaged: its digest is {publication.digest.hex()[:16]}…, the "
                f"database says {stored.digest.hex()[:16]}…. Restore the state directory from a backup."
            )
        state = load_state(stored, recipe, vectors)
        return cls(store, recipe, model, publication, state, keeping, downlink, admission, privacy, bases)

    def past_rows(self) -> list[PastRow]:
        return list(self._past.history.rows().values()) if self._past else []

    def wants_late(self, client: str, round: int, ahead: int = 0) -> bool:
        """Whether an update that missed its round would stand for its client, so many commits from now."""
        return self._past is not None and self._past.wants(client, round, self.publication.version + ahead)

    def remember_late(self, update: StoredUpdate, row: Model) -> None:
        """On the disk when this returns; a transaction must name it next."""
        assert self._past is not None
        self._past.write_late(update, row.parameters)

    def late_is_named(self, update: StoredUpdate) -> None:
        assert self._past is not None
        self._past.late_is_named(update)
        if self._aggregation is None:  # else when its round is committed
            self._past.settle()

    def shut_out(self, client: str) -> None:
        """It was revoked: its past must not steer later rounds."""
        if self._past:
            self._past.shut_out(client)

    def add(self, client: str, row: Model, asked: Iterable[str]) -> None:
        """An update is whole; `multiply` will take its row in."""
        self._expected = self._expected.union(asked, [client])
        self._arrived.append((client, row.parameters))

    def multiply(self) -> None:
        """Computes the inner products of the rows that arrived, while other clients still train.

        Those that arrived together go together: reading a row once for several is cheaper.
        """
        if not self._arrived:
            return
        if self._aggregation is None:
            version, expected = self.publication.version, sorted(self._expected)
            self._aggregation = Aggregation(
                self._recipe,
                self._layers,
                round=version,
                history=self._past.history if self._past else None,
                expected=expected,
                gate=Gate(self._admission, self._watched),
            )
        while self._arrived:
            rows = dict(self._arrived.popleft() for _ in range(len(self._arrived)))
            if self._privacy:
                self._privacy.clip(rows.values())
            self._aggregation.extend(rows)

    def aggregate(self, updates: Updates, workers: Executor, terms: Terms | None = None) -> Committed | Proposal:
        """The next model; or, under terms or by the rule's own wish, first a step to be tried: see `take`."""
        began = time.perf_counter()
        self.multiply()
        aggregation = self._aggregation
        assert aggregation is not None, "a round is aggregated only with updates in it"
        if aggregation.clients != set(updates):
            raise Bug(
                f"round {self.publication.version} has updates of {sorted(updates)}, "
                f"but rows of {sorted(aggregation.clients)}"
            )
        reports = {client: self._report(update) for client, (update, _) in updates.items()}
        disguise = self._privacy.disguise if self._privacy else None
        taken = aggregation.step(reports, self._state, out=self._spare.parameters, disguise=disguise)
        samples = [report.samples for report in taken.reports.values()]
        merge_state(self._spare, samples, [updates[client][1] for client in taken.reports])
        made = Made(aggregation, reports, taken, began)
        trials = taken.trials or (Trials(terms.halvings) if terms else None)
        if trials is not None and taken.vector.any():
            return self._propose(made, trials)
        np.subtract(self.model.parameters, taken.vector, out=self._spare.parameters)
        change = self.downlink.publish(self.model, self._spare, self.publication.version + 1)
        return self._stored(made, updates, change, time.perf_counter() - began, workers)

    def _propose(self, made: Made, trials: Trials) -> Proposal:
        step = self._spare  # the change that leads to the next version, with its buffers
        np.multiply(step.parameters, np.float32(-(2.0**trials.doublings)), out=step.parameters)
        change = self.downlink.propose(step, self.publication.version + 1)
        return Proposal(made, trials, change, time.perf_counter() - made.began)

    def take(self, proposal: Proposal, halvings: int | None, updates: Updates, workers: Executor) -> Committed:
        """Of a proposed step, 2^-halvings; or none: then the next model is this one.

        Rule and optimizer then remember nothing of the round; the history keeps its updates in either case.
        """
        made, began, model = proposal.made, time.perf_counter(), self._spare
        if halvings is None:
            model.overwrite(self.model)
            made = replace(made, taken=replace(made.taken, state=self._state))
        else:
            add_change(self.model, model, halvings, out=model)
        taken_away = self.downlink.rounded(model) if halvings is not None else None
        change = self.downlink.shorten(proposal.change, halvings, taken_away)
        return self._stored(made, updates, change, proposal.seconds + time.perf_counter() - began, workers)

    def _stored(self, made: Made, updates: Updates, change: Change, seconds: float, workers: Executor) -> Committed:
        """Begins to put the model in the spare memory on the disk, and what goes with it."""
        version, model, taken = self.publication.version + 1, self._spare, made.taken
        publishing = workers.submit(Publication.of, version, model, self.downlink.steady)
        numbers, vectors = dump_state(taken.state)
        if change.residual is not None:
            vectors = {**vectors, DOWNLINK: change.residual}
        written = workers.submit(self._write, version, model, vectors)
        # Before the commit, because the rows' memory is free after it, and the commit names their files.
        counted = {client: updates[client] for client in taken.reports}
        rows = {client: row.parameters for client, (_, row) in counted.items()}
        kept = made.aggregation.remember(rows, made.reports)
        evicted = self._past.make_room(version) if self._past else []
        if self._bases:
            bases = {
                client: (u.digest, row.parameters) for client, (u, row) in updates.items() if is_predicted(u.codec)
            }
            self._bases.write(version - 1, bases)
        publication = publishing.result()
        record = {
            **record_of(version - 1, publication.digest, counted, taken.diagnostics),
            **admission_record(taken.findings),
            "bytes_received": sum(update.size_bytes for update, _ in updates.values()),
            "aggregation_seconds": seconds,
            "history_evicted": len(evicted),
        }
        remembered = tuple(updates[client][0] for client in kept if client not in evicted)
        forgotten = tuple(self._past.unneeded()) if self._past else ()
        beside = vectors_file(version) if vectors else None
        stored = StoredModel(version, publication.digest, model_file(version), numbers, beside)
        told = json.dumps(record["diagnostics"])
        return Committed(
            stored,
            written,
            model,
            publication,
            taken.state,
            record,
            told,
            remembered,
            forgotten,
            change,
            taken.diagnostics.conflict_map,
        )

    def _write(self, version: int, model: Model, vectors: Mapping[str, Any]) -> float:
        began = time.perf_counter()
        self._store.files.write_model(version, model)
        self._store.files.write_vectors(version, vectors)
        return time.perf_counter() - began

    def adopt(self, committed: Committed, updates: Updates) -> None:
        """The model was committed: it is the newest now."""
        for client, (update, _) in updates.items():
            self._first_losses.setdefault(client, update.report.loss_before)
            self._participations[client] = self._participations.get(client, 0) + 1
        self._watched.committed({client: update.report.loss_before for client, (update, _) in updates.items()})
        self._spare, self.model, self.publication = self.model, committed.model, committed.publication
        self._state, self._aggregation, self._expected = committed.state, None, frozenset()
        self.downlink.adopt(committed.change)
        self.conflict_map = committed.conflict_map
        if self._past:
            self._past.settle()
        if self._bases:
            self._bases.settle()

    def _report(self, update: StoredUpdate) -> Report:
        report = update.report
        return Report(
            samples=report.samples,
            loss=report.loss_before,
            first_loss=self._first_losses.get(update.client, report.loss_before),
            accuracy=report.accuracy,
            participations=self._participations.get(update.client, 0) + 1,
            steps=report.steps,
            gradient_norm=report.gradient_norm,
            local_lr=report.learning_rate,
        )


def read_model(path: Path) -> Model:
    """Of the state directory: if it cannot be read, it is the directory that is at fault."""
    try:
        return Model.load(path)[0]
    except (FleetError, ValueError) as error:
        raise StateDirError(f"{path} is damaged: {error}. Restore the state directory from a backup.") from error


def layer_sizes(signature: Signature) -> list[int]:
    """The blocks in which rules see a model: its parameter tensors, as in FedLF's own experiments."""
    return [tensor.size for tensor, _ in signature.spans(Section.PARAMETERS) if tensor.size]


def uses_history(recipe: Recipe) -> bool:
    return recipe.rule.window(known=1_000_000, clients=1) > 0


def merge_state(model: Model, samples: Sequence[float], rows: Sequence[Model]) -> None:
    """What is not trained: float buffers are averaged by samples, counters take the largest."""
    shares = np.array(samples, np.float64)
    weights = shares / shares.sum() if shares.any() else np.full(len(shares), 1 / len(shares))
    model.buffers[:] = 0
    for weight, row in zip(weights, rows, strict=True):
        model.buffers[:] += np.float32(weight) * row.buffers
    np.maximum.reduce([row.counters for row in rows], out=model.counters)


# ---- what rule and optimizer remember, on the disk -----------------------------------------------


def dump_state(state: ServerState) -> tuple[str, Mapping[str, Any]]:
    after = state.optimizer or OptimizerState()
    rule = state.rule.model_dump(mode="json") if state.rule else None
    return json.dumps({"rule": rule, "optimizer": after.numbers}), after.vectors


def load_state(stored: StoredModel, recipe: Recipe, vectors: dict[str, Any]) -> ServerState:
    """As it was committed with the model; a rule or optimizer that was changed since begins anew."""
    if stored.rule_state is None:
        return ServerState()
    kept = json.loads(stored.rule_state)
    try:
        rule = recipe.rule.Memory.model_validate(kept["rule"]) if kept["rule"] is not None else None
    except ValueError:
        rule = None
    before = OptimizerState(vectors, kept["optimizer"])
    wanted = recipe.optimizer.initial(0)
    same = (before.vectors.keys(), before.numbers.keys()) == (wanted.vectors.keys(), wanted.numbers.keys())
    return ServerState(rule, before if same else None)
