"""LEAF's Synthetic: the clients of a cluster share one linear model, scaled by a number each.

The published generator has clusters of clients; AdaFedAdam cites it with its default, one cluster.
Q is a matrix of N(0, 1) for a constant and 60 features, and 10 classes. A cluster has one number
mu ~ N(N(0, 1), 1). Client k draws q_k ~ N(mu, 0.1) and labels its inputs by argmax(q_k Q x + noise)
with noise ~ N(0, 0.1). Its inputs are normal around v_k ~ N(B_k, 1), B_k ~ N(0, 1), with variances
j^-1.2. Sizes are lognormal(3, 2) + 5, at most 1,000. N(m, s) has the standard deviation s here.

One released version of the generator takes a softmax over the samples of a client before the
argmax, which makes labels depend on which samples a client has; this one takes the plain argmax.
"""

from __future__ import annotations

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import Dataset

FEATURES, CLASSES = 60, 10
MIN_SAMPLES, MAX_SAMPLES = 5, 1_000
DEVIATION = 0.1  # of a client's number around its cluster's, and of the noise in the logits


def leaf_synthetic(users: int = 100, seed: int = 0) -> Dataset:
    """Draw a dataset from its seed alone; every user is a client of its own.

    Raises UsageError if an argument is out of range.
    """
    if not (users >= 1 and seed >= 0):
        raise UsageError(
            f"leaf-synthetic needs users from 1 and a seed from 0; found {users} and {seed}"
        )
    random = np.random.default_rng(seed)
    sizes = random.lognormal(3, 2, users).astype(int) + MIN_SAMPLES
    sizes = np.minimum(sizes, MAX_SAMPLES)
    shared = random.normal(0, 1, (FEATURES + 1, CLASSES))
    cluster = random.normal(random.normal(0, 1), 1)
    samples = [_draw_client(int(size), shared, cluster, random) for size in sizes]
    return Dataset(
        name="leaf-synthetic",
        x=np.concatenate([x for x, _ in samples]),
        y=np.concatenate([y for _, y in samples]),
        train_size=int(sizes.sum()),
        classes=CLASSES,
        user=np.repeat(np.arange(users), sizes),
        user_names=tuple(f"leaf-synthetic-{n:03d}" for n in range(users)),
    )


def _draw_client(
    size: int, shared: np.ndarray, cluster: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    scales = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
    centre = random.normal(random.normal(0, 1), 1, FEATURES)
    x = centre + scales * random.standard_normal((size, FEATURES))
    weights = random.normal(cluster, DEVIATION) * shared
    logits = weights[0] + x @ weights[1:] + random.normal(0, DEVIATION, (size, CLASSES))
    return x.astype(np.float32), np.argmax(logits, axis=1).astype(np.int64)
