"""The setting `measure`, and the measures whose direction no report decides.

A direction is which values of a measure are better. It decides what is the best version and which
clients are the worst served, so a client must not be able to turn it round. For the names below it
is known, and for any other name the operator can declare it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, get_args

from fairfleet.common.errors import short
from fairfleet.common.reports import BUILT_IN, MEASURE_NAME, Better

AUTO_MEASURE = "auto"  # accuracy where clients report it, else loss

_HIGHER = """auc auroc roc_auc auprc pr_auc average_precision f1 f1_macro f1_micro f1_weighted
macro_f1 micro_f1 weighted_f1 balanced_accuracy top5_accuracy precision recall sensitivity
specificity dice iou miou mean_iou mcc kappa r2 ndcg mrr bleu psnr ssim"""
_LOWER = """mae mse rmse mape perplexity cross_entropy log_loss logloss nll brier ece error
error_rate wer cer"""
# Names that mean the same everywhere.
KNOWN: Mapping[str, Better] = {
    **dict[str, Better](dict.fromkeys(_HIGHER.split(), "higher")),
    **dict[str, Better](dict.fromkeys(_LOWER.split(), "lower")),
}


class MeasureChoice(NamedTuple):
    """By which measure versions are compared."""

    name: str  # AUTO_MEASURE: by what clients report
    declared: Better | None = None  # which values are better, if the operator says so

    @classmethod
    def of(cls, setting: str) -> MeasureChoice:
        """Return what the setting `measure` says; raise ValueError if it says nothing usable.

        >>> MeasureChoice.of("score:higher")
        MeasureChoice(name='score', declared='higher')
        """
        name, colon, direction = setting.partition(":")
        if not re.fullmatch(MEASURE_NAME, name):
            raise ValueError(
                f"{short(name)!r} cannot name a measure; give auto, accuracy, loss, or a name that "
                "tasks report: 1 to 32 of a-z, 0-9 and _, beginning with a letter"
            )
        if not colon:
            return cls(name)
        if name == AUTO_MEASURE or name in BUILT_IN:
            raise ValueError(f"{name} takes no direction; give it without {short(direction)!r}")
        if direction not in get_args(Better):
            raise ValueError(
                f"{short(direction)!r} is no direction of {name}; give {name}:higher if higher "
                f"values are better, or {name}:lower"
            )
        return cls(name, "higher" if direction == "higher" else "lower")

    def directions(self) -> dict[str, Better]:
        """Return the directions that reports cannot change, by measure."""
        declared = {self.name: self.declared} if self.declared else {}
        return {**BUILT_IN, **KNOWN, **declared}
