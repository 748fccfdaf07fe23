"""Server optimizers follow their formulas, have no hidden state and survive a restart."""

import numpy as np
import pytest

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.results import ServerState
from fairfleet.server.rules import NonFiniteStep, Recipe, Report, optimizer_vectors, recipe
from fairfleet.server.rules.optimizer_vectors import BLOCK, OptimizerState, check_finite
from fairfleet.server.rules.optimizers import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    CertaintyAdam,
    Optimizer,
    Yogi,
)

D = 300_000  # more than two chunks


def directions(n: int = 3, dtype: type = np.float64) -> list[np.ndarray]:
    """Return n random directions, the same in every call."""
    return [np.random.default_rng(k).standard_normal(D).astype(dtype) for k in range(n)]


def steps(optimizer: Optimizer, dtype: type = np.float64) -> list[np.ndarray]:
    """Return the steps that an optimizer makes from three directions."""
    state, out = optimizer.initial(D, dtype), []
    for t, direction in enumerate(directions(dtype=dtype)):
        state = optimizer.step(direction, state, round_number=t, certainty=1.5)
        out.append(direction)
    return out


def test_plain_sgd_is_the_direction_times_eta() -> None:
    for step, d in zip(steps(SGD(eta=0.5)), directions(), strict=True):
        np.testing.assert_array_equal(step, 0.5 * d)


@pytest.mark.parametrize("form", ["heavy_ball", "ema"])
def test_momentum_accumulates_directions(form: str) -> None:
    memory, fresh = np.zeros(D), 1.0 if form == "heavy_ball" else 0.1
    for step, d in zip(steps(SGD(momentum=0.9, form=form)), directions(), strict=True):
        memory = 0.9 * memory + fresh * d
        np.testing.assert_allclose(step, memory, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [Adam, Yogi, Adagrad])
def test_adaptive_steps_follow_the_papers_formulas(kind: type[Adam]) -> None:
    optimizer = kind(eta=0.1, beta1=0.8, beta2=0.9, tau=0.01)
    m, v = np.zeros(D), np.full(D, 1e-4)
    for step, d in zip(steps(optimizer), directions(), strict=True):
        m = 0.8 * m + 0.2 * d
        if kind is Adam:
            v = 0.9 * v + 0.1 * d * d
        else:
            v = v + d * d if kind is Adagrad else v - 0.1 * d * d * np.sign(v - d * d)
        np.testing.assert_allclose(step, 0.1 * m / (np.sqrt(v) + 0.01), rtol=1e-10)


def test_with_bias_correction_every_entry_of_the_first_adam_step_is_eta() -> None:
    first = steps(Adam(eta=0.1, tau=1e-12, v0=0.0, bias_correction=True))[0]
    np.testing.assert_allclose(np.abs(first), 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "rates"),
    [
        ({}, {0: 2.0, 250: 2.0}),
        ({"schedule": "exponential", "decay": 0.999}, {0: 2.0, 2: 2 * 0.999**2}),
        ({"schedule": "step", "decay": 0.5, "every": 10}, {9: 2.0, 10: 1.0, 25: 0.5}),
        ({"schedule": "inverse", "decay": 0.1}, {0: 2.0, 10: 1.0}),
        (
            {"schedule": "fedmgda", "decay": 0.1, "rounds": 2000},
            {99: 2.0, 100: 2 * 0.1**0.05, 2000: 0.2},
        ),
    ],
)
def test_schedules_give_the_rates_of_their_formulas(
    parameters: dict[str, object], rates: dict[int, float]
) -> None:
    for round_number, rate in rates.items():
        assert SGD(eta=2.0, **parameters).rate(round_number) == pytest.approx(rate, rel=1e-12)


def test_certainty_of_one_is_plain_adam_with_bias_correction() -> None:
    certain = CertaintyAdam(eta=0.1, eps=1e-8)
    adam = Adam(eta=0.1, beta1=0.9, beta2=0.999, tau=1e-8, v0=0.0, bias_correction=True)
    states = [certain.initial(D, np.float64), adam.initial(D, np.float64)]
    for t, d in enumerate(directions()):
        certain_step, adam_step = d.copy(), d.copy()
        states = [
            certain.step(certain_step, states[0], round_number=t, certainty=1.0),
            adam.step(adam_step, states[1], round_number=t),
        ]
        np.testing.assert_allclose(certain_step, adam_step, rtol=1e-7)


@pytest.mark.parametrize(
    ("mode", "paces"), [("certainty", [2, 2]), ("printed", [1, 1]), ("warmup", [1, 2])]
)
def test_certainty_scales_the_learning_rate(mode: str, paces: list[float]) -> None:
    optimizer = CertaintyAdam(lr_mode=mode)
    assert [optimizer.pace(2.0, steps) for steps in (5, 6)] == paces


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_state_written_and_read_again_continues_bit_for_bit(name: str, dtype: type) -> None:
    optimizer = OPTIMIZERS[name](momentum=0.9) if name == "sgd" else OPTIMIZERS[name]()
    straight = steps(optimizer, dtype)
    state = optimizer.initial(D, dtype)
    for t, direction in enumerate(directions(dtype=dtype)):
        state = optimizer.step(direction, state, round_number=t, certainty=1.5)
        assert direction.tobytes() == straight[t].tobytes()
        saved = {key: vector.tobytes() for key, vector in state.vectors.items()}
        state = OptimizerState(
            {key: np.frombuffer(raw, dtype).copy() for key, raw in saved.items()},
            dict(state.numbers),
        )


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_float32_states_stay_float32_and_finite(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    assert all(vector.dtype == np.float32 for vector in optimizer.initial(5).vectors.values())
    assert all(
        np.isfinite(step).all() and step.dtype == np.float32
        for step in steps(optimizer, np.float32)
    )


def with_memory(name: str, **parameters: float) -> Optimizer:
    """Return the optimizer of this name; SGD with momentum, so that it remembers something."""
    return (
        OPTIMIZERS[name](momentum=0.9, **parameters)
        if name == "sgd"
        else OPTIMIZERS[name](**parameters)
    )


def bits(state: OptimizerState) -> tuple[dict[str, bytes], dict[str, float]]:
    """Return the content of a state as bytes and numbers."""
    return {name: vector.tobytes() for name, vector in state.vectors.items()}, dict(state.numbers)


@pytest.mark.parametrize("rounds_before", [0, 1, 2, 3])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_step_that_is_not_taken_leaves_no_trace(name: str, rounds_before: int) -> None:
    optimizer = with_memory(name)
    state = optimizer.initial(D, np.float64)
    for t in range(rounds_before):
        state = optimizer.step(directions()[t % 3], state, round_number=t)
    before = bits(state)
    for direction in directions():
        after = optimizer.step(direction, state, round_number=rounds_before)
        assert bits(after) != before
        assert bits(state) == before
    first, again = directions()[0], directions()[0]
    optimizer.step(first, state, round_number=rounds_before)
    optimizer.step(
        again, OptimizerState(dict(state.vectors), dict(state.numbers)), round_number=rounds_before
    )
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_two_sets_of_vectors_alternate(name: str) -> None:
    optimizer = with_memory(name)
    state, places = optimizer.initial(D), set[int]()
    for t, direction in enumerate(directions(6, np.float32)):
        state = optimizer.step(direction, state, round_number=t)
        places |= {vector.ctypes.data for vector in state.vectors.values()}
    assert len(places) == 2 * len(state.vectors)


@pytest.mark.parametrize("size", [1e20, 3.4e38])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_no_step_and_no_state_that_overflowed_is_used(name: str, size: float) -> None:
    built = Recipe("fedavg", recipe("fedavg").rule, with_memory(name, eta=10.0))
    model, reports = np.zeros(4, np.float32), {"ann": Report(1, 1.0), "bob": Report(1, 1.0)}
    state = aggregate(
        model, {client: np.ones(4, np.float32) for client in reports}, reports, built
    ).state
    assert state.optimizer is not None
    before = bits(state.optimizer)
    rows = {client: np.full(4, size, np.float32) for client in reports}
    if name == "sgd" and size == 1e20:
        assert np.isfinite(
            aggregate(model, rows, reports, built, state=state, round_number=1).model
        ).all()
    else:
        with pytest.raises(NonFiniteStep):
            aggregate(model, rows, reports, built, state=state, round_number=1)
    assert bits(state.optimizer) == before


def test_the_error_says_how_many_values_overflowed_and_what_to_do() -> None:
    rows = {"ann": np.array([1e20, 1.0], np.float32)}
    with pytest.raises(
        NonFiniteStep, match=r"1 of 2 values of the optimizer's v are not finite.* smaller eta"
    ):
        aggregate(
            np.zeros(2, np.float32),
            rows,
            {"ann": Report(1, 1.0)},
            recipe("fedadam"),
            state=ServerState(),
        )


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, D - 1])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_overflow_is_found_in_every_block(name: str, place: int) -> None:
    """1e20 fits float32, its square does not: in Adam only the second moment overflows."""
    optimizer = with_memory(name, eta=1.0)
    state = optimizer.initial(D)
    good = optimizer.step(np.ones(D, np.float32), state)
    assert good.is_finite
    direction = np.ones(D, np.float32)
    direction[place] = np.inf if name == "sgd" else 1e20
    bad = optimizer.step(direction, good)
    assert not bad.is_finite
    with pytest.raises(NonFiniteStep, match=f"1 of {D} values"):
        check_finite(direction, bad)


def test_vectors_checked_in_blocks_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(
        optimizer_vectors, "count_non_finite", lambda vector: checked.append(vector.size) or 0
    )
    reports = {"ann": Report(1, 1.0)}
    rows = {"ann": np.ones(4, np.float32)}
    for optimizer in (Adam(), SGD(), SGD(eta=0.5), SGD(momentum=0.9)):
        aggregate(
            np.zeros(4, np.float32),
            rows,
            reports,
            Recipe("fedavg", recipe("fedavg").rule, optimizer),
        )
    assert checked == []


class UncheckedOptimizer(Optimizer):
    """An optimizer of another package that does not check its result."""

    def step(  # type: ignore[override]
        self, direction: np.ndarray, state: OptimizerState, **_: object
    ) -> OptimizerState:
        direction[0] = np.inf
        return OptimizerState()


class UncheckedSGD(SGD):
    """A subclass of SGD that does not check its result."""

    def step(  # type: ignore[override]
        self, direction: np.ndarray, state: OptimizerState, **_: object
    ) -> OptimizerState:
        direction[0] = np.nan
        return state


@pytest.mark.parametrize("optimizer", [UncheckedOptimizer(), UncheckedSGD()])
def test_the_result_of_an_optimizer_without_checks_is_checked(optimizer: Optimizer) -> None:
    built = Recipe("fedavg", recipe("fedavg").rule, optimizer)
    with pytest.raises(NonFiniteStep, match="1 of 4 values of the step"):
        aggregate(
            np.zeros(4, np.float32), {"ann": np.ones(4, np.float32)}, {"ann": Report(1, 1.0)}, built
        )
