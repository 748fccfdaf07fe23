"""Measures of test outputs that a user of the simulation might name."""

from __future__ import annotations

from torch import Tensor

from fairfleet.client import higher, lower
from fairfleet.common.reports import Measure


def errors(outputs: Tensor, targets: Tensor) -> dict[str, Measure]:
    """Return the share of wrong answers in percent, and the mean probability of the right one."""
    wrong = (outputs.argmax(1) != targets).double().mean().item()
    right = outputs.softmax(1).gather(1, targets[:, None]).double().mean().item()
    return {"error_percent": lower(100 * wrong), "confidence": higher(right)}
