"""Server optimizers follow their formulas, keep nothing to themselves, and survive a restart in the middle."""

import numpy as np
import pytest

from fairfleet.server.optimizers import OPTIMIZERS, SGD, Adagrad, Adam, CertaintyAdam, Optimizer, OptimizerState, Yogi

D = 300_000  # more than two chunks


def directions(n: int = 3, dtype: type = np.float64) -> list[np.ndarray]:
    return [np.random.default_rng(k).standard_normal(D).astype(dtype) for k in range(n)]


def steps(optimizer: Optimizer, dtype: type = np.float64) -> list[np.ndarray]:
    state, out = optimizer.initial(D, dtype), []
    for t, direction in enumerate(directions(dtype=dtype)):
        state = optimizer.step(direction, state, round=t, certainty=1.5)
        out.append(direction)
    return out


def test_plain_sgd_is_the_direction_times_eta() -> None:
    for step, d in zip(steps(SGD(eta=0.5)), directions(), strict=True):
        np.testing.assert_array_equal(step, 0.5 * d)


@pytest.mark.parametrize("form", ["heavy_ball", "ema"])
def test_momentum_remembers(form: str) -> None:
    memory, fresh = np.zeros(D), 1.0 if form == "heavy_ball" else 0.1
    for step, d in zip(steps(SGD(momentum=0.9, form=form)), directions(), strict=True):
        memory = 0.9 * memory + fresh * d
        np.testing.assert_allclose(step, memory, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [Adam, Yogi, Adagrad])
def test_adaptive_steps_are_the_papers(kind: type[Adam]) -> None:
    optimizer = kind(eta=0.1, beta1=0.8, beta2=0.9, tau=0.01)
    m, v = np.zeros(D), np.full(D, 1e-4)
    for step, d in zip(steps(optimizer), directions(), strict=True):
        m = 0.8 * m + 0.2 * d
        if kind is Adam:
            v = 0.9 * v + 0.1 * d * d
        else:
            v = v + d * d if kind is Adagrad else v - 0.1 * d * d * np.sign(v - d * d)
        np.testing.assert_allclose(step, 0.1 * m / (np.sqrt(v) + 0.01), rtol=1e-10)


def test_bias_correction_makes_the_first_adam_step_eta_long_everywhere() -> None:
    first = steps(Adam(eta=0.1, tau=1e-12, v0=0.0, bias_correction=True))[0]
    np.testing.assert_allclose(np.abs(first), 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "rates"),
    [
        ({}, {0: 2.0, 250: 2.0}),
        ({"schedule": "exponential", "decay": 0.999}, {0: 2.0, 2: 2 * 0.999**2}),
        ({"schedule": "step", "decay": 0.5, "every": 10}, {9: 2.0, 10: 1.0, 25: 0.5}),
        ({"schedule": "inverse", "decay": 0.1}, {0: 2.0, 10: 1.0}),
        ({"schedule": "fedmgda", "decay": 0.1, "rounds": 2000}, {99: 2.0, 100: 2 * 0.1**0.05, 2000: 0.2}),
    ],
)
def test_schedules(parameters: dict[str, object], rates: dict[int, float]) -> None:
    for round, rate in rates.items():
        assert SGD(eta=2.0, **parameters).rate(round) == pytest.approx(rate, rel=1e-12)


def test_certainty_of_one_is_plain_adam_with_bias_correction() -> None:
    certain = CertaintyAdam(eta=0.1, eps=1e-8)
    adam = Adam(eta=0.1, beta1=0.9, beta2=0.999, tau=1e-8, v0=0.0, bias_correction=True)
    states = [certain.initial(D, np.float64), adam.initial(D, np.float64)]
    for t, d in enumerate(directions()):
        one, other = d.copy(), d.copy()
        states = [certain.step(one, states[0], round=t, certainty=1.0), adam.step(other, states[1], round=t)]
        np.testing.assert_allclose(one, other, rtol=1e-7)


@pytest.mark.parametrize(("mode", "paces"), [("certainty", [2, 2]), ("printed", [1, 1]), ("warmup", [1, 2])])
def test_certainty_paces_the_rate(mode: str, paces: list[float]) -> None:
    optimizer = CertaintyAdam(lr_mode=mode)
    assert [optimizer.pace(2.0, steps) for steps in (5, 6)] == paces


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_state_written_and_read_again_continues_bit_for_bit(name: str, dtype: type) -> None:
    optimizer = OPTIMIZERS[name](momentum=0.9) if name == "sgd" else OPTIMIZERS[name]()
    straight = steps(optimizer, dtype)
    state = optimizer.initial(D, dtype)
    for t, direction in enumerate(directions(dtype=dtype)):
        state = optimizer.step(direction, state, round=t, certainty=1.5)
        assert direction.tobytes() == straight[t].tobytes()
        saved = {key: vector.tobytes() for key, vector in state.vectors.items()}
        state = OptimizerState(
            {key: np.frombuffer(raw, dtype).copy() for key, raw in saved.items()}, dict(state.numbers)
        )


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_float32_states_stay_float32_and_finite(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    assert all(vector.dtype == np.float32 for vector in optimizer.initial(5).vectors.values())
    assert all(np.isfinite(step).all() and step.dtype == np.float32 for step in steps(optimizer, np.float32))
