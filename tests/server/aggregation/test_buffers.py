"""Buffers and counters follow the decisions about their updates."""

from __future__ import annotations

import numpy as np
import pytest

from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Model
from fairfleet.server.aggregation.buffers import (
    MAX_INCREMENT,
    BufferRule,
    check_buffers,
    merge_state,
    merged_counters,
)
from fairfleet.server.rules.robust import column_median

MOST = np.iinfo(np.int64).max


def model(mean: float, variance: float = 1.0, count: int = 0) -> Model:
    return Model.of(
        {"weight": np.ones(2, np.float32)},
        {
            "norm.running_mean": np.full(3, mean, np.float32),
            "norm.running_var": np.full(3, variance, np.float32),
            "norm.num_batches_tracked": np.array(count),
        },
    )


def merged(rows: list[Model], rule: BufferRule | None = None) -> Model:
    out = model(0.0)
    named = {f"client-{index}": row for index, row in enumerate(rows)}
    merge_state(out, model(0.0), named, rule or BufferRule(np.ones(len(rows)), np.ones(len(rows))))
    return out


def test_ordinary_buffers_are_averaged_by_their_shares() -> None:
    rule = BufferRule(np.array([1.0, 3.0, 4.0]), np.ones(3))
    buffers = merged([model(0.1), model(0.2), model(0.4)], rule)
    np.testing.assert_allclose(
        buffers.named()["norm.running_mean"], (0.1 + 0.6 + 1.6) / 8, rtol=1e-6
    )


@pytest.mark.parametrize("attack", [1e30, -1e30, 3.4e38])
def test_one_of_five_cannot_move_the_buffers_far(attack: float) -> None:
    buffers = merged([*(model(value) for value in (0.1, 0.2, 0.3, 0.4)), model(attack)])
    assert np.abs(buffers.buffers).max() < 10


def test_one_of_five_that_pushes_in_every_round_moves_the_buffers_by_a_bounded_amount() -> None:
    """The others move the buffers by a tenth of the way to the true mean 1, like batch norm."""
    current, shares = model(1.0), BufferRule(np.ones(5), np.ones(5))
    for _ in range(200):
        mean = float(current.named()["norm.running_mean"][0])
        honest = {f"honest-{index}": model(mean + 0.1 * (1.0 - mean)) for index in range(4)}
        out = model(0.0)
        findings = merge_state(out, current, {**honest, "eve": model(1e30)}, shares)
        assert [(finding.client, finding.check, finding.decision) for finding in findings] == [
            ("eve", "buffers", "clipped")
        ]
        current = out
    assert abs(float(current.named()["norm.running_mean"][0]) - 1.0) < 0.5


def test_a_clipped_update_changes_the_buffers_in_the_same_proportion() -> None:
    rule = BufferRule(np.array([1.0, 1.0]), np.array([1.0, 0.5]))
    buffers = merged([model(0.0), model(2.0)], rule)
    np.testing.assert_allclose(buffers.named()["norm.running_mean"], 0.5)


def test_a_column_rule_is_applied_to_buffers_too() -> None:
    rule = BufferRule(np.ones(3), np.ones(3), column_median)
    np.testing.assert_allclose(
        merged([model(1.0), model(2.0), model(1e30)], rule).named()["norm.running_mean"], 2.0
    )


def test_counters_grow_by_the_median_and_within_a_bound() -> None:
    current = np.array([100], np.int64)
    assert merged_counters(
        current, [np.array([107]), np.array([105]), np.array([MOST])]
    ).tolist() == [107]
    assert merged_counters(current, [np.array([MOST])]).tolist() == [100 + MAX_INCREMENT]
    assert merged_counters(current, [np.array([-MOST - 1])]).tolist() == [100]
    assert merged_counters(np.array([MOST - 1]), [np.array([MOST])]).tolist() == [MOST]
    assert merged_counters(np.array([-MOST - 1]), [np.array([MOST])]).tolist() == [
        -MOST - 1 + MAX_INCREMENT
    ]


def test_a_negative_variance_is_refused_by_name_and_no_sign_is_assumed_for_other_buffers() -> None:
    check_buffers(model(-5.0, 0.0))
    with pytest.raises(BadRequest, match=r"norm.running_var holds a negative variance"):
        check_buffers(model(1.0, -1e-9))
