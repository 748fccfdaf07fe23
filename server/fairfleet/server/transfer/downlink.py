"""Models as changes: with a lossy downlink, the committed model is one that clients can compute.

The master copy is the result of rule and optimizer. The server sends the encoded change from the
last published model to it. The model that is published, committed and trained is the last one plus
the *decoded* change. The rest (the residual) is kept and added in the next round. So digests,
losses and updates all refer to a model that server and clients hold bit for bit: decoding rounds
one product per value, and adding it is a separate rounded sum.

If models are sent in a codec of fewer bytes, every published model is rounded to it, also after a
change, and the rounding error joins the residual. So a newcomer that gets the full model has the
same one as clients that followed the changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fairfleet.common.chunk_stream import Pieces, state_pieces
from fairfleet.common.codecs import RAW32, Codec, codec_named, round_to, steady_codec
from fairfleet.common.tensors import Model, Section, Vector
from fairfleet.server.transfer.published_model import PublishedModel

DOWNLINK = "downlink"  # name of the residual among the vectors stored with a model


@dataclass(frozen=True)
class Change:
    """A new version of the model as a change from the one before."""

    publication: PublishedModel | None  # None if only full models are sent
    residual: Vector | None  # master copy minus published model


class Downlink:
    """Encodes changes of the model, and keeps the residual and the newest changes."""

    def __init__(
        self,
        codec: str = "raw32",
        keep: int = 4,
        residual: Vector | None = None,
        model: str = "raw32",
    ) -> None:
        """`codec` encodes changes, `model` full models; the newest `keep` changes are available."""
        self._codec = codec_named(codec)
        # Models are rounded to what this codec can represent.
        self.steady = steady_codec(model) if model != RAW32.name else None
        self._residual = residual
        self._changes: deque[PublishedModel] = deque(maxlen=keep)

    @property
    def codec(self) -> str:
        """The codec of changes."""
        return self._codec.name if self._codec.lossy else RAW32.name

    @property
    def is_lossy(self) -> bool:
        """Whether the published model may differ from the aggregated one."""
        return self._codec.lossy or self.steady is not None

    @property
    def changes(self) -> tuple[PublishedModel, ...]:
        """The changes to the newest versions, each from the version before.

        There is none where no step was taken. A restart forgets them.
        """
        return tuple(self._changes)

    def publish(self, before: Model, master: Model, version: int) -> Change:
        """Turn `master`, in place, into the model that is published as `version`."""
        if not self._codec.lossy:
            if self._residual is not None:  # perhaps of an earlier run with a lossy downlink
                np.add(master.parameters, self._residual, out=master.parameters)
            return Change(None, self.rounded(master))
        lost = np.empty_like(master.parameters)
        pieces = change_pieces(
            before, master, self._residual, self._codec, self.steady, version, lost
        )
        return Change(PublishedModel.of_pieces(version, pieces), lost)

    def propose(self, step: Model, version: int) -> Change:
        """Encode a step for the clients that try it; overwrite it with what they decode."""
        if self._codec.lossy:
            lost = np.empty_like(step.parameters)
            pieces = step_pieces(step, self._residual, self._codec, version, lost)
            return Change(PublishedModel.of_pieces(version, pieces), lost)
        if self._residual is not None:
            np.add(step.parameters, self._residual, out=step.parameters)
        return Change(PublishedModel.of(version, step), None)

    def rounded(self, model: Model) -> Vector | None:
        """Round a model in place to what `steady` represents; return the rounding error."""
        if self.steady is None:
            return None
        lost = model.parameters.copy()
        round_to(self.steady, model.parameters)
        return np.subtract(lost, model.parameters, out=lost)

    def shorten(
        self, change: Change, halvings: int | None, rounded: Vector | None = None
    ) -> Change:
        """Return 2^-halvings of a proposed change, or no change; the rest of the residual stays.

        `rounded` is the rounding error of the resulting model.
        """
        factor = 0.0 if halvings is None else 2.0**-halvings
        parts = [(factor, change.residual), (1.0 - factor, self._residual), (1.0, rounded)]
        residuals = [
            np.float32(share) * part for share, part in parts if share and part is not None
        ]
        publication = (
            change.publication.shortened(halvings)
            if change.publication and halvings is not None
            else None
        )
        return Change(publication, sum(residuals[1:], residuals[0]) if residuals else None)

    def adopt(self, change: Change) -> None:
        """Record that the model of a change was committed."""
        self._residual = change.residual
        if change.publication is None:
            return
        if not self._codec.lossy:
            # The change is as large as the model: useful only to clients that already have it.
            self._changes.clear()
            change.publication.retire()
        self._changes.append(change.publication)


def step_pieces(
    step: Model, residual: Vector | None, codec: Codec, version: int, lost: Vector
) -> Pieces:
    """Yield an encoded step by chunks.

    Overwrites `step` with what is decoded, and `lost` with the difference.
    """
    size = len(step.parameters)
    for first in range(0, size, codec.elements_per_chunk):
        span = slice(first, min(first + codec.elements_per_chunk, size))
        values, missing = step.parameters[span], lost[span]
        if residual is not None:
            values += residual[span]
        data = codec.encode(values, (version, first))
        missing[:] = values
        codec.decode(data, values)
        missing -= values
        yield Section.PARAMETERS, first, len(values), data
    yield from state_pieces(step)


def change_pieces(
    before: Model,
    after: Model,
    residual: Vector | None,
    codec: Codec,
    steady: Codec | None,
    version: int,
    lost: Vector,
) -> Pieces:
    """Yield an encoded change by chunks.

    Overwrites `after` with what is published, and `lost` with the difference. Chunks begin
    at block boundaries, so rounding chunks is the same as rounding the model.
    """
    size = len(after.parameters)
    scratch = np.empty(min(size, codec.elements_per_chunk), np.float32)
    for first in range(0, size, codec.elements_per_chunk):
        span = slice(first, min(first + codec.elements_per_chunk, size))
        master, base, missing = after.parameters[span], before.parameters[span], lost[span]
        published = scratch[: len(master)]
        if residual is not None:
            master += residual[span]
        data = codec.encode(np.subtract(master, base, out=missing), (version, first))
        codec.decode(data, published)
        published += base
        if steady is not None:
            round_to(steady, published)
        np.subtract(master, published, out=missing)
        master[:] = published
        yield Section.PARAMETERS, first, len(master), data
    yield from state_pieces(after)
