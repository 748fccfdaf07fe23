"""FedAvg and FedAvg-n: the weighted mean of the updates, as they are or each scaled to length one.

FedAvg: McMahan et al., AISTATS 2017. FedAvg-n: Hu et al., FedMGDA+, IEEE TNSE 2022.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fairfleet.server.rules.algebra import moved, spread
from fairfleet.server.rules.base import Cohort, Rule, State, Step, Weighting


class FedAvg(Rule):
    """d = sum w_k g_k"""

    summary: ClassVar[str] = "weighted mean of the updates"
    weighting: Weighting = "samples"

    def is_plain_mean(self) -> bool:
        return type(self) is FedAvg and self.weighting == "uniform"  # a rule made from it may do anything

    def step(self, cohort: Cohort, state: State) -> Step:
        return Step(cohort.weights(self.weighting))


class FedAvgN(Rule):
    """d = sum w_k g_k / |g_k|"""

    summary: ClassVar[str] = "mean of the normalised updates: a large update cannot dominate"
    weighting: Weighting = "uniform"

    def step(self, cohort: Cohort, state: State) -> Step:
        here = moved(cohort.own.whole)
        if not len(here):
            return Step(np.zeros(len(cohort)), status="stationary")
        weights = cohort.weights(self.weighting)[here]
        return Step(spread(weights / weights.sum() / cohort.own.norms[here], here, len(cohort)))
