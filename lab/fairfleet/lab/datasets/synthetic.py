"""Synthetic(alpha, beta) of FedProx: each client has its own linear model and inputs.

Client k draws u_k ~ N(0, alpha) and labels its inputs by argmax(W x + b) with W, b ~ N(u_k, 1).
Its inputs are normal around v_k ~ N(B_k, 1), B_k ~ N(0, beta), with variances j^-1.2. So alpha
says how much the clients' models differ, and beta how much their inputs differ; both are
variances. Sizes are lognormal: a few clients have most of the data. LEAF's generator is another
one (`leaf_synthetic`).
"""

from __future__ import annotations

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import Dataset

FEATURES, CLASSES = 60, 10
MIN_SAMPLES = 50
MAX_SAMPLES = 100_000  # A lognormal draw is unbounded, but memory is not.


def synthetic(alpha: float = 1.0, beta: float = 1.0, users: int = 100, seed: int = 0) -> Dataset:
    """Draw a dataset from its seed alone; every user is a client of its own.

    Raises UsageError if an argument is out of range.
    """
    if not (0 <= alpha < np.inf and 0 <= beta < np.inf and users >= 1 and seed >= 0):
        raise UsageError(
            "synthetic needs finite alpha and beta from 0, users from 1 and a seed from 0; found "
            f"{alpha}, {beta}, {users} and {seed}"
        )
    random = np.random.default_rng(seed)
    sizes = np.minimum(random.lognormal(4, 2, users).astype(int) + MIN_SAMPLES, MAX_SAMPLES)
    scales = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
    samples = [_draw_client(int(size), alpha, beta, scales, random) for size in sizes]
    return Dataset(
        name=f"synthetic({alpha:g},{beta:g})",
        x=np.concatenate([x for x, _ in samples]),
        y=np.concatenate([y for _, y in samples]),
        train_size=int(sizes.sum()),
        classes=CLASSES,
        user=np.repeat(np.arange(users), sizes),
        user_names=tuple(f"synthetic-{n:03d}" for n in range(users)),
    )


def _draw_client(
    size: int, alpha: float, beta: float, scales: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    weights = random.normal(random.normal(0, np.sqrt(alpha)), 1, (CLASSES, FEATURES + 1))
    centre = random.normal(random.normal(0, np.sqrt(beta)), 1, FEATURES)
    x = centre + scales * random.standard_normal((size, FEATURES))
    y = np.argmax(x @ weights[:, :-1].T + weights[:, -1], axis=1)
    return x.astype(np.float32), y.astype(np.int64)
