"""The mean of all models of a run so far, and copies of models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.tensors import Model, Vector


class ModelAverage:
    """The mean of the parameters of the models so far, summed in float64."""

    def __init__(self) -> None:
        self.total: NDArray[np.float64] | None = None
        self.count = 0

    def add(self, parameters: Vector) -> None:
        """Add the parameters of the newest model."""
        if self.total is None:
            self.total = np.zeros(len(parameters))
        self.total += parameters
        self.count += 1

    def applied_to(self, model: Model) -> Model:
        """Return a copy of the model with the mean of all parameters."""
        averaged = copy_model(model)
        if self.total is not None:
            averaged.parameters[:] = self.total / self.count
        return averaged


def copy_model(model: Model) -> Model:
    """Return a copy with memory of its own, because rounds overwrite earlier models."""
    return Model(
        model.signature, model.parameters.copy(), model.buffers.copy(), model.counters.copy()
    )
