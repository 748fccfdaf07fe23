"""The length of a direction: that of the mean update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fairfleet.server.rules.base import Step
from fairfleet.server.rules.cohort import Vector
from fairfleet.server.rules.solvers.algebra import length, uniform, vanishes


def rescaled(
    coefficients: Vector, gram: Vector, clients: int, status: str, notes: Mapping[str, Any]
) -> Step:
    """Return the same direction, as long as the mean update.

    Otherwise the rule's own scale, such as a power of the losses, would set the step size.
    """
    mean = uniform(clients, len(gram))
    if vanishes(mean, gram):
        return Step(np.zeros(len(gram)), status="zero_mean", notes=notes)
    return Step(coefficients * length(mean, gram) / length(coefficients, gram), status, notes=notes)
