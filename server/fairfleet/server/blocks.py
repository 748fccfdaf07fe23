"""Long vectors in blocks, on all cores: how the columns are cut, and who works on which cut."""

from __future__ import annotations

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

SEGMENT = 32768  # columns of one dot product: long enough that threads rarely meet at the interpreter's lock
CHUNK = 8 * SEGMENT  # columns that a thread takes at a time
CORES = os.cpu_count() or 1

_scratch = local()
_turn = Lock()  # the limit on BLAS is the whole process's: one at a time


class Chunk(NamedTuple):
    """A run of columns inside one layer."""

    layer: int
    start: int
    stop: int


def chunks(layers: Sequence[int]) -> Iterator[Chunk]:
    for layer, (start, stop) in enumerate(pairwise(accumulate(layers, initial=0))):
        for at in range(start, stop, CHUNK):
            yield Chunk(layer, at, min(at + CHUNK, stop))


def pieces(chunk: Chunk, length: int) -> Iterator[tuple[int, int]]:
    for start in range(chunk.start, chunk.stop, length):
        yield start, min(start + length, chunk.stop)


def workspace(size: int) -> NDArray[np.float64]:
    """Scratch memory of this thread, kept between calls: fresh pages would cost more than the arithmetic."""
    space: NDArray[np.float64] | None = getattr(_scratch, "space", None)
    if space is None or space.size < size:
        space = _scratch.space = np.zeros(size)
    return space[:size]


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


@contextmanager
def own_threads() -> Iterator[None]:
    """While our threads share the work, BLAS must not start its own beneath each of them."""
    with _turn, _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix="blocks")
