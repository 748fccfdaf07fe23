"""Checks that a staged model and state are finite before they are committed.

No other module makes this check. It reads each value once, while the value is in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.tensors import Model, Section, Vector
from fairfleet.server.gram.blocks import (
    Chunk,
    all_finite,
    chunks,
    map_chunks,
    pieces,
    single_threaded_blas,
)

BLOCK = 1 << 17  # values checked together; their flags fit in the processor's cache


class NonFiniteResult(ArithmeticError):
    """Aggregation produced an infinite value or NaN; nothing was committed."""


def is_finite(values: NDArray[Any]) -> bool:
    """Return whether every value is finite, in one pass over the memory."""
    flat = values.reshape(-1)
    with np.errstate(all="ignore"):
        return all(all_finite(flat[start : start + BLOCK]) for start in range(0, flat.size, BLOCK))


def model_is_finite(model: Model) -> bool:
    """Return whether all parameters and buffers are finite."""
    return is_finite(model.parameters) and is_finite(model.buffers)


def check_model(model: Model) -> None:
    """Raise NonFiniteResult, which names the first non-finite tensor, if there is one."""
    for section in (Section.PARAMETERS, Section.BUFFERS):
        if is_finite(model.vector(section)):
            continue
        for tensor, span in model.signature.spans(section):
            if not is_finite(model.vector(section)[span]):
                raise NonFiniteResult(
                    f"tensor {tensor.name} of the next model holds a value that is not finite"
                )


def take_step(before: Model, step: Vector, after: Model) -> None:
    """Write the parameters of `before` minus the step into `after`.

    The buffers of `after` must be set already. Raises NonFiniteResult if `after` is not finite.
    """

    def step_chunk(chunk: Chunk) -> bool:
        """Step the values of one chunk; return whether the results are finite."""
        finite = True
        with np.errstate(all="ignore"):  # the setting is per thread
            for start, stop in pieces(chunk, BLOCK):
                block = after.parameters[start:stop]
                np.subtract(before.parameters[start:stop], step[start:stop], out=block)
                finite = finite and all_finite(block)
        return finite

    with single_threaded_blas():
        finite = all(map_chunks(step_chunk, list(chunks([len(step)]))))
    if not finite or not is_finite(after.buffers):
        check_model(after)  # raises with the name of the tensor


def check_sum(model: Model, change: Model) -> None:
    """Raise NonFiniteResult unless the model plus a change of its parameters is finite.

    Neither argument is changed.
    """

    def sum_is_finite(chunk: Chunk) -> bool:
        """Return whether the sums of one chunk are finite."""
        with np.errstate(all="ignore"):  # the setting is per thread
            return all(
                all_finite(model.parameters[start:stop] + change.parameters[start:stop])
                for start, stop in pieces(chunk, BLOCK)
            )

    with single_threaded_blas():
        finite = all(map_chunks(sum_is_finite, list(chunks([len(model.parameters)]))))
    if not finite:
        raise NonFiniteResult("the model after the step that clients are to try is not finite")


def check_state(numbers: Any, vectors: Mapping[str, NDArray[Any]]) -> None:
    """Raise NonFiniteResult if the state of the rule or optimizer is not finite."""
    for name, vector in vectors.items():
        if not is_finite(vector):
            raise NonFiniteResult(f"{name} holds a value that is not finite")
    if not _numbers_are_finite(numbers):
        raise NonFiniteResult(
            "the state of the rule or the server optimizer holds a number that is not finite"
        )


def _numbers_are_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_numbers_are_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_numbers_are_finite, value))
    return True
