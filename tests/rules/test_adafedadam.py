"""AdaFedAdam divides losses as its paper, its released code, or earlier versions do."""

from __future__ import annotations

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.rules import Report, recipe
from fairfleet.server.rules.weights.adafedadam import AdaFedAdam

ROWS = {"ann": np.array([3.0, 0.0]), "bob": np.array([0.0, 4.0])}


def shares(reference: str, alpha: float = 1.0) -> np.ndarray:
    """Return the clients' shares S_k / sum S.

    Norms equal the gradient norms, so the coefficients are the shares.
    """
    reports = {
        "ann": Report(10, 1.0, first_loss=2.0, gradient_norm=3.0, local_lr=1.0),
        "bob": Report(30, 0.5, first_loss=2.0, gradient_norm=4.0, local_lr=1.0),
    }
    rule = recipe("adafedadam", reference=reference, alpha=alpha, lr_mode="printed")
    direction = aggregate(np.zeros(2), ROWS, reports, rule).diagnostics.coefficients
    return np.array(list(direction.values()) if isinstance(direction, dict) else direction)


@pytest.mark.parametrize(
    ("reference", "alpha", "expected"),
    [
        ("initial", 1.0, [10 / 2, 30 / 4]),
        ("first", 1.0, [10 / 2, 30 / 4]),
        ("none", 1.0, [10 * 1.0, 30 * 0.5]),
        ("none", 2.0, [10 * 1.0, 30 * 0.25]),
        ("initial", 2.0, [10 / 4, 30 / 16]),
        ("initial", 0.0, [10, 30]),
    ],
)
def test_losses_are_divided_as_the_reference_says(
    reference: str, alpha: float, expected: list[float]
) -> None:
    wanted = np.array(expected) / sum(expected)
    np.testing.assert_allclose(shares(reference, alpha), wanted, rtol=1e-12)


def test_the_released_form_needs_no_first_loss() -> None:
    assert "first_loss" not in AdaFedAdam(reference="none").needs().reports
    assert "first_loss" not in AdaFedAdam(alpha=0).needs().reports
    assert "first_loss" in AdaFedAdam().needs().reports


def test_only_the_papers_form_needs_losses_on_the_initial_model() -> None:
    wanted = {kind: AdaFedAdam(reference=kind).needs() for kind in ("initial", "first", "none")}
    assert {kind: needs.initial_loss for kind, needs in wanted.items()} == {
        "initial": True,
        "first": False,
        "none": False,
    }
    assert AdaFedAdam().reference == "initial"
    assert not AdaFedAdam(alpha=0).needs().initial_loss
