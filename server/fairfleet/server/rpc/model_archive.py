"""The models that are kept: their list, and one of them as a file with what is known of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict

from fairfleet.common import wire
from fairfleet.common.codecs import CHUNK_BYTES
from fairfleet.common.errors import BadRequest, NotKept, short
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.event_stream import score_message
from fairfleet.server.rounds.version_ranking import VersionScore
from fairfleet.server.storage.files.exported_model import ExportedModel
from fairfleet.server.storage.server_evaluation_table import recorded_server_evaluations
from fairfleet.server.storage.store import Store, StoredModel


class ModelArchive:
    """Lists and exports the models of the state directory."""

    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        self._state, self._store = coordinator.state, store

    # ---- the list ------------------------------------------------------------------------------

    async def records(self) -> AsyncIterator[pb.ModelRecord]:
        """Yield a record of each version that is kept, the oldest first."""
        stored = await asyncio.to_thread(self._store.kept_models)
        times = await asyncio.to_thread(self._store.committed_unix)
        results = await asyncio.to_thread(recorded_server_evaluations, self._store)
        evaluations = {result.version: result.evaluation for result in results}
        newest, best = self._state.publication.version, self._state.best_version
        for model in stored:
            record = pb.ModelRecord(
                version=model.version,
                digest=model.digest,
                size_bytes=await asyncio.to_thread(self._size_of, model),
                unix_seconds=times.get(model.version, 0.0),
                kept_because=self._state.kept_versions.reasons(model.version, newest, best),
                scores=[score_message(score) for score in self._scores(model.version)],
            )
            if evaluation := evaluations.get(model.version):
                record.server_evaluation.CopyFrom(wire.evaluation_out(evaluation))
            yield record

    def _scores(self, version: int) -> list[VersionScore]:
        return list(self._state.kept_versions.scores(version).values())

    def _size_of(self, model: StoredModel) -> int:
        """Return the size of a model's file; 0 if it was retired just now."""
        path = self._store.folder / model.file
        return path.stat().st_size if path.exists() else 0

    # ---- one of them ---------------------------------------------------------------------------

    async def export(self, request: pb.ExportModelRequest) -> AsyncIterator[pb.FileChunk]:
        """Yield the file of the version that a request means; raise NotKept if there is none."""
        version = self._version_of(request)
        model = await self._stored(version)
        if model is None:
            raise NotKept(self._why_not_kept(version, await asyncio.to_thread(self._kept)))
        with self._store.files.reading(model.file) as path:
            try:
                file = await asyncio.to_thread(ExportedModel, path, self._metadata(model))
            except FileNotFoundError:
                raise NotKept(await self._why_no_file(model)) from None
            async for chunk in _file_chunks(file, version):
                yield chunk

    async def _stored(self, version: int) -> StoredModel | None:
        # A peer may send a number that no database can compare.
        if version > self._state.publication.version:
            return None
        return await asyncio.to_thread(self._store.model, version)

    async def _why_no_file(self, model: StoredModel) -> str:
        """Return why the file of a version that was kept just now is not there."""
        if await self._stored(model.version) is None:
            return (
                f"version {model.version} was just retired; `fairfleet models` lists what is kept"
            )
        return (
            f"the file of version {model.version} is missing: {self._store.folder / model.file}. "
            "Restore it from a backup of the state directory"
        )

    def _version_of(self, request: pb.ExportModelRequest) -> int:
        if request.best and request.HasField("version"):
            raise BadRequest("version and best are both set; send one of them")
        if not request.best:
            newest = self._state.publication.version
            return request.version if request.HasField("version") else newest
        best = self._state.best_version
        if best is None:
            raise NotKept(
                f"{self._why_no_best()}. Export the newest, or a --version that `fairfleet models` "
                "lists"
            )
        return best

    def _why_no_best(self) -> str:
        if why := self._state.kept_versions.why_no_best(self._state.under_evaluation):
            return f"no version is the best: {why}"
        every = self._state.settings.round.evaluate_every
        schedule = {0: "never (round.evaluate_every is 0)", 1: "after each round"}
        return (
            "no version that is kept was evaluated, so none is the best; clients evaluate "
            f"{schedule.get(every, f'every {every} rounds')}"
        )

    def _kept(self) -> list[int]:
        return [model.version for model in self._store.kept_models()]

    def _why_not_kept(self, version: int, kept: list[int]) -> str:
        newest = self._state.publication.version
        versions = short(", ".join(map(str, kept)), 200)
        if version > newest:
            return f"version {version} is not kept; the newest is {newest}"
        if version == 0:
            return (
                "version 0 is not kept: an earlier version of the server deleted it. "
                f"Kept are {versions}"
            )
        return (
            f"version {version} is not kept; the newest is {newest}. Kept are {versions} "
            "(the newest `keep_models`, the best evaluated one and version 0)"
        )

    def _metadata(self, model: StoredModel) -> dict[str, str]:
        """Return what is known of a version beside what its file says."""
        scores = {score.measure: _without_name(score) for score in self._scores(model.version)}
        return {
            "federation": self._store.federation,
            "federation_id": self._store.federation_id,
            "version": str(model.version),
            "digest": model.digest.hex(),
            "scores": json.dumps(scores),
        }


def _without_name(score: VersionScore) -> dict[str, object]:
    return {key: value for key, value in asdict(score).items() if key != "measure"}


async def _file_chunks(file: ExportedModel, version: int) -> AsyncIterator[pb.FileChunk]:
    pieces: Iterator[bytes] = file.pieces(CHUNK_BYTES)
    offset = 0
    try:
        while data := await asyncio.to_thread(next, pieces, b""):
            yield pb.FileChunk(
                offset_bytes=offset, data=data, size_bytes=file.size_bytes, version=version
            )
            offset += len(data)
    finally:
        file.close()
