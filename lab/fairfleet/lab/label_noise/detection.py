"""FedCorr's decisions: which clients are noisy, which labels are suspect, and what replaces them.

The server splits the clients by their dimensions. Everything else needs a client's samples and
happens on the client.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fairfleet.lab.label_noise.mixture import upper_component
from fairfleet.lab.label_noise.noise import Labels

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def noisy_clients(dimensions: Floats) -> Mask:
    """Return which clients are noisy: those of the component with the higher dimension.

    A client without a dimension (NaN, for too few samples) counts as clean.
    """
    known = np.isfinite(dimensions)
    noisy = np.zeros(len(dimensions), bool)
    noisy[known] = upper_component(np.asarray(dimensions[known], np.float64))
    return noisy


def suspects(losses: Floats) -> Mask:
    """Return which of a client's labels are suspect: the component with the higher loss.

    Their share is the client's estimated noise level.
    """
    return upper_component(losses)


def most_suspect(losses: Floats, level: float, share: float) -> NDArray[np.intp]:
    """Return the samples to review: those with the highest losses.

    They are the share `share` of the estimated number of wrong labels, rounded down.
    """
    count = int(len(losses) * level * share)
    return np.argsort(-losses, kind="stable")[:count]


def relabelled(
    labels: Labels,
    probabilities: Floats,
    confidence: float,
    reviewed: NDArray[np.intp] | None = None,
) -> Labels:
    """Return the labels, replaced by the model's where it is more certain than `confidence`.

    Only reviewed samples are replaced; None reviews all. The given array is not changed.
    """
    certain = probabilities.max(1) > confidence
    if reviewed is not None:
        allowed = np.zeros(len(labels), bool)
        allowed[reviewed] = True
        certain &= allowed
    return np.where(certain, probabilities.argmax(1), labels)
