"""Long vectors in blocks, on all cores: how the columns are cut, and who works on which cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from threading import local
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

SEGMENT = 8192  # columns of one dot product; BLAS keeps dots up to 10,000 on the calling thread
CHUNK = 16 * SEGMENT  # columns that a thread takes at a time: long calls, so that threads rarely meet at the GIL

CORES = os.cpu_count() or 1

_scratch = local()


class Chunk(NamedTuple):
    """A run of columns inside one layer."""

    layer: int
    start: int
    stop: int


def chunks(layers: Sequence[int]) -> Iterator[Chunk]:
    for layer, (start, stop) in enumerate(pairwise(accumulate(layers, initial=0))):
        for at in range(start, stop, CHUNK):
            yield Chunk(layer, at, min(at + CHUNK, stop))


def spans(chunk: Chunk, width: int) -> Iterator[tuple[int, int]]:
    """Cuts a chunk into runs of whole segments, at most `width` long, and the odd segment at its end."""
    whole = chunk.stop - (chunk.stop - chunk.start) % SEGMENT
    for start in range(chunk.start, whole, width):
        yield start, min(start + width, whole)
    if whole < chunk.stop:
        yield whole, chunk.stop


def workspace(lines: int, width: int) -> NDArray[np.float64]:
    """Scratch memory of this thread, kept between calls: fresh pages would cost more than the arithmetic."""
    space: NDArray[np.float64] | None = getattr(_scratch, "space", None)
    if space is None or space.size < lines * width:
        space = _scratch.space = np.empty(lines * width)
    return space[: lines * width].reshape(lines, width)


def spread(work: Callable[[Chunk], T], cuts: Sequence[Chunk]) -> list[T]:
    """The work on all chunks, on all cores; results in the order of the chunks."""
    results: dict[int, T] = {}
    left = iter(range(len(cuts)))  # shared: whoever is free takes the next chunk

    def drain() -> None:
        for at in left:
            results[at] = work(cuts[at])

    others = [_pool().submit(drain) for _ in range(min(CORES, len(cuts)) - 1)]
    drain()  # the caller works too: one thread less to wake
    for other in others:
        other.result()
    return [results[at] for at in range(len(cuts))]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix="blocks")
