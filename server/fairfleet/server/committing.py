"""From a round's updates to the next committed model: aggregate, put on the disk, serialize for sending.

Runs in worker threads. Nothing here is visible to anyone until the coordinator has committed it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairfleet.common.errors import StateDirError
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.common.wire import report_out
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.publication import Publication
from fairfleet.server.store import Store, StoredUpdate

Updates = Mapping[str, tuple[StoredUpdate, Model]]


@dataclass(frozen=True)
class Committed:
    """A model that is on the disk and ready to be sent; it becomes the federation's by one transaction."""

    version: int
    model: Model
    publication: Publication
    file: str
    record: dict[str, Any]

    @property
    def digest(self) -> bytes:
        return self.publication.digest


class Committer:
    def __init__(self, store: Store, model: Model, publication: Publication) -> None:
        self._store = store
        self.model = model
        self.publication = publication
        self._spare = Model.empty(model.signature)  # the next model is made in it; the two take turns

    @classmethod
    def open(cls, store: Store, version: int) -> Committer:
        found = store.model_file(version)
        if found is None:
            raise StateDirError(f"{store.folder} has no model of version {version}; restore it from a backup")
        path, digest = found
        model, _ = Model.load(path)
        publication = Publication.of(version, model)
        if publication.digest != digest:
            raise StateDirError(
                f"{path} is damaged: its digest is {publication.digest.hex()[:16]}…, the database says "
                f"{digest.hex()[:16]}…. Restore the state directory from a backup."
            )
        return cls(store, model, publication)

    def aggregate(self, updates: Updates, workers: Executor) -> Committed:
        began = time.perf_counter()
        version = self.publication.version + 1
        weights = sample_weights(updates)
        model = self._spare
        rows = [row.parameters for _, row in updates.values()]
        np.copyto(model.parameters, self.model.parameters)
        for weight, row in zip(weights, rows, strict=True):
            model.parameters[:] -= np.float32(weight) * row
        merge_state(model, updates, weights)
        aggregated = time.perf_counter()
        publishing = workers.submit(Publication.of, version, model)
        file = self._store.write_model(version, model)
        publication = publishing.result()
        record = {
            "round": version - 1,
            "digest": publication.digest.hex(),
            "contributions": [
                {"client": client, "weight": weight, "report": update.report.model_dump()}
                for (client, (update, _)), weight in zip(updates.items(), weights, strict=True)
            ],
            "aggregation_seconds": aggregated - began,
            "commit_seconds": time.perf_counter() - aggregated,
            "bytes_received": sum(update.size_bytes for update, _ in updates.values()),
            "diagnostics": {},
            "unix_seconds": time.time(),
        }
        return Committed(version, model, publication, file, record)

    def adopt(self, committed: Committed) -> None:
        self._spare, self.model, self.publication = self.model, committed.model, committed.publication


def sample_weights(updates: Updates) -> list[float]:
    samples = [update.report.samples for update, _ in updates.values()]
    total = sum(samples)
    return [n / total for n in samples] if total else [1 / len(samples)] * len(samples)


def merge_state(model: Model, updates: Updates, weights: list[float]) -> None:
    """What is not trained: float buffers are averaged by samples, counters take the largest."""
    model.buffers[:] = 0
    for weight, (_, row) in zip(weights, updates.values(), strict=True):
        model.buffers[:] += np.float32(weight) * row.buffers
    np.maximum.reduce([row.counters for _, row in updates.values()], out=model.counters)


def record_out(record: dict[str, Any]) -> pb.RoundRecord:
    plain = {key: value for key, value in record.items() if key not in ("digest", "contributions", "diagnostics")}
    contributions = [
        pb.ClientContribution(client=c["client"], weight=c["weight"], report=report_out(TrainReport(**c["report"])))
        for c in record["contributions"]
    ]
    return pb.RoundRecord(
        digest=bytes.fromhex(record["digest"]),
        contributions=contributions,
        diagnostics_json=json.dumps(record["diagnostics"]),
        **plain,
    )
