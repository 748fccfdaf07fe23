"""Models as changes: with a lossy downlink, the model that is committed is the one that clients can reach.

Where rule and optimizer want to go is the master copy. What is sent is the change from the last published model to it,
encoded; what is published, committed and trained is the last model plus the *decoded* change; the rest is kept and
wanted again in the next round. So digest, losses and updates all speak of a model that server and clients hold bit for
bit: decoding rounds one product per value, and adding it is a rounded sum of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fairfleet.common.codecs import Codec, codec_named
from fairfleet.common.stream import Pieces, state_pieces
from fairfleet.common.tensors import Model, Section, Vector
from fairfleet.server.publication import Publication


@dataclass(frozen=True)
class Change:
    publication: Publication | None  # from the version before; None where models are only sent whole
    residual: Vector | None  # master copy minus published model


class Downlink:
    def __init__(self, codec: str = "raw32", kept: int = 4, residual: Vector | None = None) -> None:
        self._codec = codec_named(codec)
        self._residual = residual
        self._changes: deque[Publication] = deque(maxlen=kept)

    @property
    def codec(self) -> str:
        return self._codec.name

    @property
    def changes(self) -> tuple[Publication, ...]:
        """Of the newest versions, each from the one before it, without a gap. A restart forgets them."""
        return tuple(self._changes)

    def publish(self, before: Model, wanted: Model, version: int) -> Change:
        """Turns `wanted` into the model that is published as `version`."""
        if not self._codec.lossy:
            if self._residual is not None:  # of an earlier run, whose downlink was lossy
                np.add(wanted.parameters, self._residual, out=wanted.parameters)
            return Change(None, None)
        lost = np.empty_like(wanted.parameters)
        pieces = change_pieces(before, wanted, self._residual, self._codec, version, lost)
        return Change(Publication.of_pieces(version, pieces), lost)

    def adopt(self, change: Change) -> None:
        """The model was committed."""
        self._residual = change.residual
        if change.publication is not None:
            self._changes.append(change.publication)


def change_pieces(
    before: Model, wanted: Model, residual: Vector | None, codec: Codec, version: int, lost: Vector
) -> Pieces:
    """Overwrites `wanted` with what is published, and `lost` with what is not, chunk by chunk."""
    size = len(wanted.parameters)
    scratch = np.empty(min(size, codec.elements_per_chunk), np.float32)
    for first in range(0, size, codec.elements_per_chunk):
        span = slice(first, min(first + codec.elements_per_chunk, size))
        master, base, missing = wanted.parameters[span], before.parameters[span], lost[span]
        published = scratch[: len(master)]
        if residual is not None:
            master += residual[span]
        data = codec.encode(np.subtract(master, base, out=missing), (version, first))
        codec.decode(data, published)
        published += base
        np.subtract(master, published, out=missing)
        master[:] = published
        yield Section.PARAMETERS, first, len(master), data
    yield from state_pieces(wanted)
