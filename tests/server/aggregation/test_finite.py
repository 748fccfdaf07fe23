"""Non-finite values in a staged model, or in the state of rule and optimizer, are found."""

from __future__ import annotations

import numpy as np
import pytest

from fairfleet.common.tensors import Model
from fairfleet.server.aggregation.finite import (
    BLOCK,
    NonFiniteResult,
    check_model,
    check_state,
    is_finite,
    take_step,
)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_one_value_that_is_not_finite_is_found_anywhere(value: float, place: int) -> None:
    vector = np.zeros(3 * BLOCK + 6, np.float32)
    assert is_finite(vector)
    vector[place] = value
    assert not is_finite(vector)


def test_the_tensor_is_named() -> None:
    model = Model.of(
        {"one": np.ones(3), "two": np.ones(2)}, {"running_mean": np.zeros(1, np.float32)}
    )
    check_model(model)
    model.named()["two"][1] = np.inf
    with pytest.raises(NonFiniteResult, match="tensor two"):
        check_model(model)


def test_state_is_checked_in_vectors_and_nested_numbers() -> None:
    check_state(
        {"rule": {"weights": {"ann": 0.5}}, "optimizer": {"steps": 3}}, {"momentum": np.zeros(3)}
    )
    with pytest.raises(NonFiniteResult, match="second holds"):
        check_state({}, {"second": np.array([1.0, np.inf])})
    with pytest.raises(NonFiniteResult, match="state of the rule"):
        check_state({"rule": {"weights": {"ann": float("nan")}}, "optimizer": {}}, {})


def model_of(size: int) -> Model:
    return Model.of(
        {"one": np.ones(size), "two": np.ones(2)}, {"running_mean": np.zeros(1, np.float32)}
    )


def test_a_step_can_be_taken_in_place() -> None:
    before, after = model_of(3 * BLOCK + 1), model_of(3 * BLOCK + 1)
    after.parameters[:] = step = (
        np.random.default_rng(0).standard_normal(len(before.parameters)).astype(np.float32)
    )
    take_step(before, after.parameters, after)
    np.testing.assert_array_equal(after.parameters, before.parameters - step)


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK, -1])
@pytest.mark.parametrize(("old", "step"), [(1.0, np.inf), (1.0, np.nan), (3.4e38, -3.4e38)])
def test_a_step_that_exceeds_float32_is_refused_and_names_the_tensor(
    old: float, step: float, place: int
) -> None:
    before, after = model_of(3 * BLOCK + 1), model_of(3 * BLOCK + 1)
    before.parameters[place], after.parameters[place] = old, step
    with pytest.raises(NonFiniteResult, match="tensor two" if place == -1 else "tensor one"):
        take_step(before, after.parameters, after)


def test_buffers_are_checked_with_the_step() -> None:
    before, after = model_of(5), model_of(5)
    after.buffers[0] = np.inf
    with pytest.raises(NonFiniteResult, match="running_mean"):
        take_step(before, after.parameters, after)
