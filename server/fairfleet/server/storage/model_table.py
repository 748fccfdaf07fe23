"""The table of committed models: digests of all versions, and the files of those that are kept."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Row

from fairfleet.server.storage.queries import Write, writing
from fairfleet.server.storage.schema import models
from fairfleet.server.storage.state_database import StateDatabase

_is_kept = models.c.file.is_not(None)


@dataclass(frozen=True)
class StoredModel:
    """A committed version. Its files are named relative to the state directory."""

    version: int
    digest: bytes
    file: str
    rule_state: str | None = None  # of the rule and the optimizer, as JSON
    vectors_file: str | None = None  # of the optimizer's vectors


class ModelTable(StateDatabase):
    """The models of a federation."""

    def model(self, version: int) -> StoredModel | None:
        """Return a version; None if its file is not kept."""
        query = sa.select(models).where(models.c.version == version, _is_kept)
        rows = self.rows(query)
        return _stored_model(rows[0]) if rows else None

    def kept_models(self) -> list[StoredModel]:
        """Return all versions whose files are kept, in order."""
        query = sa.select(models).where(_is_kept).order_by(models.c.version)
        return [_stored_model(row) for row in self.rows(query)]

    def committed_unix(self) -> dict[int, float]:
        """Return when each version that is kept was committed."""
        query = sa.select(models.c.version, models.c.unix_seconds)
        return {row.version: row.unix_seconds for row in self.rows(query.where(_is_kept))}

    def model_digest(self, version: int) -> bytes | None:
        """Return the digest of a version; None if it was never committed."""
        digest = self.scalar(sa.select(models.c.digest).where(models.c.version == version))
        return bytes.fromhex(digest) if digest else None

    def model_digests(self) -> dict[int, bytes]:
        """Return the digests of all versions that were ever committed."""
        rows = self.rows(sa.select(models.c.version, models.c.digest))
        return {row.version: bytes.fromhex(row.digest) for row in rows}

    def named_files(self) -> set[str]:
        """Return the files of the models that are kept, with the optimizer's vectors."""
        rows = self.rows(sa.select(models.c.file, models.c.vectors_file))
        return {file for row in rows for file in row if file is not None}

    def began_unix(self) -> float:
        """Return when the federation was created."""
        began = self.scalar(sa.select(models.c.unix_seconds).where(models.c.version == 0))
        return float(began or 0.0)


def model_write(model: StoredModel) -> Write:
    """Record a version. Its files must be on the disk."""
    row = {**asdict(model), "digest": model.digest.hex(), "unix_seconds": time.time()}
    return writing(models.insert(), row)


def forget_files_write(newest: int, pinned: Collection[int]) -> Write:
    """Record that the models up to a version, apart from the pinned ones, are not kept any more."""
    is_old = (models.c.version <= newest) & models.c.version.not_in(sorted(pinned))
    old = models.update().where(is_old, _is_kept)
    return writing(old.values(file=None, vectors_file=None))


def _stored_model(row: Row[*tuple[object, ...]]) -> StoredModel:
    digest = bytes.fromhex(row.digest)
    return StoredModel(row.version, digest, row.file, row.rule_state, row.vectors_file)
