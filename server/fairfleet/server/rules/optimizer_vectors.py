"""The state of server optimizers, and arithmetic on vectors as long as the model.

Work is done in blocks that stay in the processor's cache, on all cores. Each block is checked for
overflow while it is there. `check_finite` keeps a step or a state that overflowed from being used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fairfleet.server.gram.blocks import (
    CHUNK,
    Chunk,
    Row,
    all_finite,
    chunks,
    map_chunks,
    pieces,
    single_threaded_blas,
    workspace,
)
from fairfleet.server.rules.errors import NonFiniteStep

# Values of each vector that are processed at a time: the blocks of all vectors fit the cache.
BLOCK = 1 << 16
REMEDY = (
    "an update or a rate is too large for the arithmetic. Leave out the largest updates or limit "
    "their norms (admission), or choose a smaller eta"
)


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer remembers: named vectors as long as the model, and named numbers."""

    vectors: dict[str, Row] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    # The vectors of the state before this one. The next step overwrites them with its own, because
    # new memory would cost half a step.
    spare: dict[str, Row] = field(default_factory=dict, repr=False, compare=False)
    # Whether the step that gave this state, and its vectors, were found finite when computed.
    is_finite: bool = field(default=False, repr=False, compare=False)

    def buffer(self, name: str) -> Row:
        """Return memory for the vector of this name in the next state: a spare or a new array."""
        vector, spare = self.vectors[name], self.spare.get(name)
        if (
            spare is not None
            and spare.shape == vector.shape
            and spare.dtype == vector.dtype
            and spare.flags.writeable
        ):
            return spare
        return np.empty_like(vector)


def run_in_blocks(work: Callable[..., None], *vectors: Row, results: Sequence[int] = (0,)) -> bool:
    """Call `work` on the same columns of every vector, block by block, on all cores.

    `results` are the positions of vectors that `work` overwrites. Return whether these are
    finite; values that overflow become infinite, without a warning.
    """

    def run_chunk(chunk: Chunk) -> bool:
        finite = True
        # The setting belongs to the thread. `check_finite` reports what overflowed.
        with np.errstate(all="ignore"):
            for start, stop in pieces(chunk, BLOCK):
                blocks = [vector[start:stop] for vector in vectors]
                work(*blocks)
                finite = finite and all(all_finite(blocks[index]) for index in results)
        return finite

    with single_threaded_blas():
        return all(map_chunks(run_chunk, list(chunks([len(vectors[0])]))))


def next_moments(
    work: Callable[..., None], direction: Row, state: OptimizerState
) -> tuple[dict[str, Row], bool]:
    """Call `work` on blocks of the direction, the moments m and v, and the next m and v.

    Return the next moments, and whether they and the step are finite. The step is a multiple of
    m: if it is finite, so is m.
    """
    after = {"m": state.buffer("m"), "v": state.buffer("v")}
    vectors = direction, state.vectors["m"], state.vectors["v"], after["m"], after["v"]
    return after, run_in_blocks(work, *vectors, results=(0, 4))


def blend(memory: Row, fresh: Row, keep: float, take: float, spare: Row, *, out: Row) -> None:
    """Compute out = keep memory + take fresh; `spare` is scratch memory."""
    np.multiply(fresh, take, out=spare)
    np.multiply(memory, keep, out=out)
    np.add(out, spare, out=out)


def divide_by_root(
    m: Row, v: Row, correction: float, floor: float, rate: float, *, out: Row
) -> None:
    """Compute out = rate m / (sqrt(v / correction) + floor)."""
    np.divide(v, correction, out=out)
    np.sqrt(out, out=out)
    np.add(out, floor, out=out)
    np.divide(m, out, out=out)
    np.multiply(out, rate, out=out)


def scratch(like: Row) -> Row:
    """Return scratch memory of this thread, with the length and type of a block."""
    return np.asarray(workspace(CHUNK).view(like.dtype)[: len(like)])


def check_finite(step: Row, state: OptimizerState, *, step_is_finite: bool = False) -> None:
    """Raise NonFiniteStep unless the step and the optimizer's next state are finite.

    What is already known to be finite is not checked again.
    """
    for name, number in state.numbers.items():
        if not math.isfinite(number):
            raise NonFiniteStep(f"the optimizer's {name} is {number}; {REMEDY}")
    if state.is_finite:
        return
    vectors = {} if step_is_finite else {"the step": step}
    vectors |= {f"the optimizer's {name}": vector for name, vector in state.vectors.items()}
    for name, vector in vectors.items():
        if wrong := count_non_finite(vector):
            raise NonFiniteStep(
                f"{wrong} of {vector.size} values of {name} are not finite; {REMEDY}"
            )


def count_non_finite(vector: Row) -> int:
    """Return how many values are NaN or infinite.

    A finite sum of squares proves in one pass that a block has none; only otherwise are they
    counted.
    """

    def count_in_chunk(chunk: Chunk) -> int:
        block = vector[chunk.start : chunk.stop]
        with np.errstate(all="ignore"):
            return 0 if all_finite(block) else int(np.count_nonzero(~np.isfinite(block)))

    with single_threaded_blas():
        return sum(map_chunks(count_in_chunk, list(chunks([len(vector)]))))
