"""Cohorts of updates and losses that hypothesis draws."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fairfleet.server.rules import Report
from tests.support.samples.reports import some_report

Rows = dict[str, np.ndarray]


seeds = st.integers(0, 2**32 - 1)


def fleet(seed: int, m: int, d: int = 40, scale: bool = True) -> tuple[Rows, dict[str, Report]]:
    """Updates that share a part and conflict in the rest, with norms over two decades."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((m, d)) + rng.uniform(0, 1) * rng.standard_normal(d)
    if scale:
        matrix *= 10 ** rng.uniform(-1, 1, (m, 1))
    rows = {f"client {k:03d}": matrix[k] for k in range(m)}
    return rows, {client: some_report(rng) for client in rows}
