"""Cut long vectors into blocks of columns and work on the blocks on all cores.

A chunk never crosses the border of a layer, and results come back in the order of the chunks.
The result of a computation therefore does not depend on the number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from threading import Lock, local
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
Row = NDArray[np.floating[Any]]
Matrix = NDArray[np.float64]
ColumnRule = Callable[[Row], Row]  # (rows, columns) -> (columns,)

# Columns of one dot product. Shorter ones make threads wait for the interpreter's lock.
SEGMENT = 32768
CHUNK = 8 * SEGMENT  # columns that a thread takes at a time
ONE_THREAD = 8192  # columns of a dot product that BLAS does not split among threads
CORES = os.cpu_count() or 1

_scratch = local()
# BLAS has one thread limit for the process, so only one caller may change it at a time.
_blas_limit_lock = Lock()


class Chunk(NamedTuple):
    """A run of columns inside one layer: `start` is included, `stop` is not."""

    layer: int
    start: int
    stop: int


def chunks(layers: Sequence[int]) -> Iterator[Chunk]:
    """Cut layers of these lengths into chunks of at most CHUNK columns, in order."""
    for layer, (first, last) in enumerate(pairwise(accumulate(layers, initial=0))):
        for start in range(first, last, CHUNK):
            yield Chunk(layer, start, min(start + CHUNK, last))


def pieces(chunk: Chunk, length: int) -> Iterator[tuple[int, int]]:
    """Cut a chunk into (start, stop) ranges of at most `length` columns, in order."""
    for start in range(chunk.start, chunk.stop, length):
        yield start, min(start + length, chunk.stop)


def workspace(size: int) -> NDArray[np.float64]:
    """Return `size` float64 values of scratch memory of this thread, with arbitrary content.

    The memory is reused by later calls: new pages would cost more than the arithmetic.
    """
    space: NDArray[np.float64] | None = getattr(_scratch, "space", None)
    if space is None or space.size < size:
        space = _scratch.space = np.zeros(size)
    return space[:size]


def all_finite(block: NDArray[Any]) -> bool:
    """Return whether every value of a block is finite.

    A finite sum of squares proves it in one fast pass. Only otherwise is each value checked.
    Call it inside `np.errstate`, because the sum may overflow. If several threads call it at
    once, also use `single_threaded_blas`: BLAS would split each sum among threads of its own.
    """
    return math.isfinite(np.dot(block, block)) or bool(np.isfinite(block).all())


def squared_length(block: Row) -> float:
    """Return the squared length of a block to a few digits, infinite if a value is not finite.

    Call it inside `np.errstate`, because the sum may overflow.
    """
    total = 0.0
    for start in range(0, len(block), ONE_THREAD):
        part = block[start : start + ONE_THREAD]
        total += float(np.dot(part, part))
    if math.isfinite(total):
        return total
    if not np.isfinite(block).all():
        return math.inf
    largest = float(np.abs(block).max())
    scaled = squared_length(block / block.dtype.type(largest))
    return min(scaled * largest**2, float(np.finfo(np.float64).max))


def length(vector: Row) -> float:
    """Return the Euclidean length of a vector, summed in float64."""

    def sum_squares(chunk: Chunk) -> float:
        wide = (vector[start:stop].astype(np.float64) for start, stop in pieces(chunk, SEGMENT))
        return sum(float(np.einsum("i,i->", part, part)) for part in wide)

    return float(np.sqrt(sum(map_chunks(sum_squares, list(chunks([len(vector)]))))))


def map_chunks(work: Callable[[Chunk], T], cuts: Sequence[Chunk]) -> list[T]:
    """Call `work` on every chunk, on all cores; return the results in the order of the chunks."""
    results: dict[int, T] = {}
    pending = iter(range(len(cuts)))  # shared: each idle thread takes the next chunk

    def drain() -> None:
        for index in pending:
            results[index] = work(cuts[index])

    workers = [_pool().submit(drain) for _ in range(min(CORES, len(cuts)) - 1)]
    drain()  # The calling thread works too, so one thread less has to be woken.
    for worker in workers:
        worker.result()
    return [results[index] for index in range(len(cuts))]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Keep BLAS from starting threads while our own threads share the work.

    The limit applies to the process, so callers wait for each other here.
    """
    with _blas_limit_lock, _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix="blocks")
