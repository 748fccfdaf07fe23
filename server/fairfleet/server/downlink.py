"""Models as changes: with a lossy downlink, the model that is committed is the one that clients can reach.

Where rule and optimizer want to go is the master copy. What is sent is the change from the last published model to it,
encoded; what is published, committed and trained is the last model plus the *decoded* change; the rest is kept and
wanted again in the next round. So digest, losses and updates all speak of a model that server and clients hold bit for
bit: decoding rounds one product per value, and adding it is a rounded sum of its own.

If models are kept in a codec of fewer bytes, every published one is rounded to it, after a change as well, and what
rounding takes away is held back like the rest. So the model that is sent whole to a newcomer is the one that the others
reached by changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fairfleet.common.codecs import RAW32, Codec, codec_named, round_to, steady_codec
from fairfleet.common.stream import Pieces, state_pieces
from fairfleet.common.tensors import Model, Section, Vector
from fairfleet.server.publication import Publication

DOWNLINK = "downlink"  # what is held back, among the vectors that are kept with a model


@dataclass(frozen=True)
class Change:
    publication: Publication | None  # from the version before; None where models are only sent whole
    residual: Vector | None  # master copy minus published model


class Downlink:
    def __init__(
        self, codec: str = "raw32", kept: int = 4, residual: Vector | None = None, model: str = "raw32"
    ) -> None:
        """`codec` is of changes, `model` of the models themselves."""
        self._codec = codec_named(codec)
        self.steady = steady_codec(model) if model != RAW32.name else None  # what models are rounded to
        self._residual = residual
        self._changes: deque[Publication] = deque(maxlen=kept)

    @property
    def codec(self) -> str:
        """Of changes."""
        return self._codec.name if self._codec.lossy else RAW32.name

    @property
    def changes(self) -> tuple[Publication, ...]:
        """Of the newest versions, each from the one before it; none where no step was taken. A restart forgets them."""
        return tuple(self._changes)

    def publish(self, before: Model, wanted: Model, version: int) -> Change:
        """Turns `wanted` into the model that is published as `version`."""
        if not self._codec.lossy:
            if self._residual is not None:  # perhaps of an earlier run, whose downlink was lossy
                np.add(wanted.parameters, self._residual, out=wanted.parameters)
            return Change(None, self.rounded(wanted))
        lost = np.empty_like(wanted.parameters)
        pieces = change_pieces(before, wanted, self._residual, self._codec, self.steady, version, lost)
        return Change(Publication.of_pieces(version, pieces), lost)

    def propose(self, step: Model, version: int) -> Change:
        """A step on its way to those who are to try it; overwrites it with what they decode."""
        if self._codec.lossy:
            lost = np.empty_like(step.parameters)
            pieces = step_pieces(step, self._residual, self._codec, version, lost)
            return Change(Publication.of_pieces(version, pieces), lost)
        if self._residual is not None:
            np.add(step.parameters, self._residual, out=step.parameters)
        return Change(Publication.of(version, step), None)

    def rounded(self, model: Model) -> Vector | None:
        """Makes it one that can be published whole; returns what that takes away."""
        if self.steady is None:
            return None
        lost = model.parameters.copy()
        round_to(self.steady, model.parameters)
        return np.subtract(lost, model.parameters, out=lost)

    def shorten(self, change: Change, halvings: int | None, rounded: Vector | None = None) -> Change:
        """What of a proposed change is made: 2^-halvings of it, or nothing. The rest of what was held back stays so.

        `rounded` is what rounding took from the model that was reached.
        """
        factor = 0.0 if halvings is None else 2.0**-halvings
        parts = [(factor, change.residual), (1.0 - factor, self._residual), (1.0, rounded)]
        held_back = [np.float32(share) * part for share, part in parts if share and part is not None]
        publication = change.publication.shortened(halvings) if change.publication and halvings is not None else None
        return Change(publication, sum(held_back[1:], held_back[0]) if held_back else None)

    def adopt(self, change: Change) -> None:
        """The model was committed."""
        self._residual = change.residual
        if change.publication is None:
            return
        if not self._codec.lossy:  # worth something only to those who have it: it is as long as the model
            self._changes.clear()
            change.publication.retire()
        self._changes.append(change.publication)


def step_pieces(step: Model, residual: Vector | None, codec: Codec, version: int, lost: Vector) -> Pieces:
    """Overwrites `step` with what is decoded of it, and `lost` with what is not, chunk by chunk."""
    size = len(step.parameters)
    for first in range(0, size, codec.elements_per_chunk):
        span = slice(first, min(first + codec.elements_per_chunk, size))
        wanted, missing = step.parameters[span], lost[span]
        if residual is not None:
            wanted += residual[span]
        data = codec.encode(wanted, (version, first))
        missing[:] = wanted
        codec.decode(data, wanted)
        missing -= wanted
        yield Section.PARAMETERS, first, len(wanted), data
    yield from state_pieces(step)


def change_pieces(
    before: Model,
    wanted: Model,
    residual: Vector | None,
    codec: Codec,
    steady: Codec | None,
    version: int,
    lost: Vector,
) -> Pieces:
    """Overwrites `wanted` with what is published, and `lost` with what is not, chunk by chunk.

    Chunks begin where blocks do: rounding them is rounding the model.
    """
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
        if steady is not None:
            round_to(steady, published)
        np.subtract(master, published, out=missing)
        master[:] = published
        yield Section.PARAMETERS, first, len(master), data
    yield from state_pieces(wanted)
