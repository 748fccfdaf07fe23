"""FedGA: weights shift to clients with low accuracy once training has settled.

Liu: FedGA: A Fair Federated Learning Framework Based on the Gini Coefficient, 2025. The paper's
abstract names the parts (the Gini coefficient of the clients' performance, the scale of the
global update, and weights that follow the state of fairness); the formulas are our reading.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector, Weighting, shares
from fairfleet.server.rules.solvers.algebra import length


class FedGAState(State):
    """The largest scale of an update so far, and whether fairness is pursued already."""

    largest: float = 0.0
    active: bool = False


class FedGA(Rule):
    """w = (1 - s G) p + s G q, where q_k ~ p_k (1 - a_k) and G is the Gini coefficient of a.

    a_k are accuracies. Until the length of the mean update has fallen to `settled` times its
    largest value, and in rounds with G of at most `gini`, w = p: FedAvg.
    """

    summary: ClassVar[str] = "FedAvg, then weight to low accuracies as far as they are unequal"
    Memory: ClassVar[type[State]] = FedGAState
    settled: float = Field(default=0.5, gt=0.0, le=1.0)
    gini: float = Field(default=0.05, ge=0.0, lt=1.0)
    strength: float = Field(default=1.0, ge=0.0, le=1.0)  # s
    weighting: Weighting = "samples"

    def needs(self) -> Needs:
        """Return that clients must report the received model's accuracy."""
        return Needs(reports=("accuracy",), exact_losses=False)

    def step(self, cohort: Cohort, state: FedGAState) -> Step:
        """Return the weights, and the scale of the update for the next rounds."""
        p, accuracy = cohort.weights(self.weighting), cohort.reported("accuracy")
        scale, unequal = length(p, cohort.own.whole), gini_coefficient(accuracy)
        largest = max(state.largest, scale)
        active = state.active or (state.largest > 0.0 and scale <= self.settled * largest)
        lack = p * np.clip(1.0 - accuracy, 0.0, 1.0)
        share = self.strength * unequal if active and unequal > self.gini else 0.0
        weights = (1.0 - share) * p + share * shares(lack) if lack.any() else p
        notes = {"gini": unequal, "scale": scale, "active": active}
        return Step(weights, state=FedGAState(largest=largest, active=active), notes=notes)


def gini_coefficient(values: Vector) -> float:
    """Return sum |v_i - v_j| / (2 m^2 mean v), between 0 (equal) and 1; 0 if all are zero."""
    values = np.sort(np.clip(values, 0.0, None))
    count, total = len(values), float(values.sum())
    if total == 0.0:
        return 0.0
    place = np.arange(1, count + 1)
    return max(float(((2 * place - count - 1) @ values) / (count * total)), 0.0)
