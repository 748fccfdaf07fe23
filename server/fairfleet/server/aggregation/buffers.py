"""Merges buffers and counters: values that are not trained, such as batch-normalisation statistics.

They follow the decisions about the update that they came with. An update that is left out does not
count here, and one that is clipped counts in the same proportion. Rules that tolerate malicious
clients treat buffers as they treat updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Model, Section
from fairfleet.server.aggregation.admission import AdmissionFinding
from fairfleet.server.aggregation.leave_one_out import medians_of_others
from fairfleet.server.gram.blocks import ColumnRule

Vector = NDArray[np.float64]

MAX_CHANGE = 3.0  # times the median change of the others; a longer change is shortened to this
LEAST_CHANGE = 0.01  # of the length of the current buffers: shorter changes are never shortened
MAX_INCREMENT = 2**32  # of a counter in one round
MIN_UPDATES = 3  # with fewer, updates are not compared with each other
BLOCK = 1 << 16  # values that are merged together
NON_NEGATIVE = "running_var"  # buffers of this name are variances


@dataclass(frozen=True)
class BufferRule:
    """Says how the buffers of a round's updates become those of the next model."""

    shares: Vector  # one per update, not all zero
    factors: Vector  # by which changes are multiplied: 1 unless the update was clipped
    columns: ColumnRule | None = None  # instead of shares: a function of the columns


def check_buffers(row: Model) -> None:
    """Raise BadRequest if an uploaded model holds a negative variance."""
    for tensor, span in row.signature.spans(Section.BUFFERS):
        if tensor.name.endswith(NON_NEGATIVE) and (row.buffers[span] < 0).any():
            raise BadRequest(
                f"buffer {tensor.name} holds a negative variance; expected values of at least 0"
            )


def merge_state(
    out: Model, current: Model, updates: Mapping[str, Model], rule: BufferRule
) -> tuple[AdmissionFinding, ...]:
    """Fill the buffers and counters of `out`; return a finding per shortened change."""
    rows = list(updates.values())
    if current.counters.size:
        out.counters[:] = merged_counters(current.counters, [row.counters for row in rows])
    if not current.buffers.size:
        return ()
    if rule.columns:
        _merge_buffers(out, current, rows, rule, rule.factors)
        return ()
    changes, limits = change_limits(current, rows)
    shortened = changes > limits
    factors = np.divide(limits, changes, out=np.ones(len(rows)), where=shortened)
    _merge_buffers(out, current, rows, rule, rule.factors * factors)
    return tuple(
        AdmissionFinding(client, "buffers", "clipped", float(change), float(limit))
        for client, change, limit, is_long in zip(updates, changes, limits, shortened, strict=True)
        if is_long
    )


def _merge_buffers(
    out: Model, current: Model, rows: Sequence[Model], rule: BufferRule, factors: Vector
) -> None:
    shares = rule.shares / rule.shares.sum()
    for start in range(0, current.buffers.size, BLOCK):
        span = slice(start, start + BLOCK)
        base = current.buffers[span].astype(np.float64)
        values = np.stack([row.buffers[span] for row in rows]).astype(np.float64)
        for index in np.flatnonzero(factors != 1.0).tolist():
            values[index] = base + factors[index] * (values[index] - base)
        out.buffers[span] = rule.columns(values) if rule.columns else shares @ values


def change_limits(current: Model, rows: Sequence[Model]) -> tuple[Vector, Vector]:
    """Return how far each update moves the buffers, and how far it may.

    While MAX_CHANGE is below the number of other clients, these pull the buffers back faster than
    one client can push them away. So one client moves them by a bounded amount, however often it
    participates.
    """
    base = current.buffers.astype(np.float64)
    changes = np.array([float(np.linalg.norm(row.buffers - base)) for row in rows])
    if len(rows) < MIN_UPDATES:
        return changes, np.full(len(rows), np.inf)
    least = LEAST_CHANGE * float(np.linalg.norm(base))
    return changes, np.maximum(MAX_CHANGE * medians_of_others(changes), least)


def merged_counters(
    current: NDArray[np.int64], counters: Sequence[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the current counters plus the median increment.

    An increment is at most MAX_INCREMENT, and a counter never decreases.

    >>> merged_counters(np.array([10]), [np.array([13]), np.array([12]), np.array([2**63 - 1])])
    array([13])
    """
    grown = np.stack(counters)
    # Unsigned subtraction is modulo 2^64, so it is exact wherever the increment is positive.
    increments = grown.astype(np.uint64) - current.astype(np.uint64)
    increments = np.where(
        grown > current, np.minimum(increments, np.uint64(MAX_INCREMENT)), np.uint64(0)
    )
    median = np.sort(increments, axis=0)[(len(counters) - 1) // 2].astype(np.int64)
    most = np.iinfo(np.int64).max
    return np.where(current > most - median, most, current + median)
