"""Whatever one client sends, the server lives and commits the others' round with finite values.

Hypothesis draws reports, updates, buffers and codecs. Each case is one round of a real server, over
the real wire format. The cases of a rule share a server, which is killed and restarted in between.
Nothing is shrunk: a failing case depends on the rounds before it, and is printed as it was drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.rules.registry import BUILT_IN
from tests.support.attacks.hostile import HostileFederation, HostileUpdate, hostile_federation

SIZE = 23  # parameters of the test task's model
TINY, HUGE = 1.401298464324817e-45, 3.4028234663852886e38  # the largest float32
CASES_PER_RULE = 80
SHORT = {
    "fedavg": 12,
    "fedfv": 12,
    "adafedadam": 12,
    "fedlf": 12,
    "krum": 12,
}  # rules and cases of the short version

extreme = st.sampled_from(
    [
        *(
            0.0,
            -0.0,
            0.1,
            1.0,
            2.0,
            1e3,
            65505.0,
            1e20,
            1e29,
            1e30,
            5e-324,
            1e-300,
            1e-12,
            1e-6,
        ),  # mostly accepted
        *(-1.0, -1e30, -5e-324, 1e31, 1.7e308, -1.7e308, float("nan"), float("inf"), -float("inf")),
    ]
)
counts = st.sampled_from([0, 1, 2, 10, 1000, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1])
ordinary_report: dict[str, Any] = {
    "samples": 10,
    "loss_before": 1.0,
    "loss_after": 0.5,
    "gradient_norm": 1.0,
    "initial_loss": 2.0,
    "steps": 5,
    "learning_rate": 0.1,
    "accuracy": 0.5,
    "seconds": 1.0,
    "planned_steps": 5,
    "batch_size": 5,
}
FIELDS = {
    name: counts
    if name in ("samples", "steps", "planned_steps", "batch_size")
    else extreme | st.floats(0, 10)
    for name in ordinary_report
}


@st.composite
def reports(draw: st.DrawFn) -> pb.TrainReport | None:
    """An ordinary report with a few fields changed or left out; rarely no report."""
    if draw(st.integers(0, 40)) == 40:
        return None
    fields = dict(ordinary_report)
    changed = draw(st.sampled_from([0, 0, 1, 1, 2, 3]))
    for name in draw(
        st.lists(st.sampled_from(sorted(FIELDS)), min_size=changed, max_size=changed, unique=True)
    ):
        fields.pop(name)
        if draw(st.integers(0, 3)):
            fields[name] = draw(FIELDS[name])
    return pb.TrainReport(**fields)


def filled(value: float) -> NDArray[np.float32]:
    return np.full(SIZE, value, np.float32)


alternating = np.where(np.arange(SIZE) % 2, 1.0, -1.0).astype(np.float32)
one_entry = np.eye(1, SIZE, dtype=np.float32)[0]
scale = st.sampled_from(
    [0.0, TINY, -TINY, 1e-38, 1e-20, 1e-7, 0.01, 1.0, 1e6, 1e19, 1e20, 1e37, HUGE, -HUGE]
)
updates = st.one_of(
    scale.map(filled),
    scale.map(lambda value: np.float32(value) * alternating),
    scale.map(lambda value: np.float32(value) * one_entry),
    scale.map(lambda value: np.where(np.arange(SIZE) < 12, value, -0.01).astype(np.float32)),
    arrays(np.float32, SIZE, elements=st.floats(width=32)),
    arrays(np.float32, SIZE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    arrays(np.float32, SIZE, elements=st.floats(-1, 1, width=32)),
)
cases = st.builds(
    HostileUpdate,
    parameters=updates,
    report=reports(),
    running_mean=st.sampled_from(
        [0.5, 0.5, 0.0, -1.0, TINY, 1e30, HUGE, -HUGE, float("nan"), float("inf")]
    ),
    counter=st.sampled_from([0, 1, 5, -1, 2**40, 2**63 - 1, -(2**63)]),
    codec=st.sampled_from([""] * 20 + ["raw32", "fp16", "int8"]),
    announced_in_metadata=st.booleans(),
    heartbeat_loss=extreme,
    trial_losses=st.lists(extreme, min_size=1, max_size=3),
    stray_round=st.sampled_from([0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]),
    evaluation=st.builds(pb.Evaluation, samples=counts, loss=extreme, accuracy=extreme),
)

ADMISSION = {
    "off": {"admission__norm": "off", "admission__loss": "off", "admission__samples": "off"},
    "observe": {},
    "bound": {
        "admission__norm": "clip",
        "admission__loss": "winsorise",
        "admission__samples": "cap",
    },
    "reject": {
        "admission__norm": "reject",
        "admission__loss": "reject",
        "admission__samples": "cap",
    },
}


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer__name": "sgd", "optimizer__momentum": 0.9},
    {"optimizer__name": "yogi"},
    {"optimizer__name": "sgd", "optimizer__momentum": 0.9, "optimizer__form": "ema"},
    {"optimizer__name": "adagrad"},
]


def settings_for(place: int) -> dict[str, Any]:
    """Vary what is independent of the rule, so that all rules together meet all of it."""
    options: dict[str, Any] = dict(list(ADMISSION.values())[place % 4])
    options["compression__clients__eve"] = ("raw32", "raw32", "fp16", "int8", "topk:0.5")[place % 5]
    options["history__precision"] = ("float32", "float16")[place % 2]
    options["durability"] = ("update", "update", "round")[place % 3]
    options |= OPTIMIZERS[place % len(OPTIMIZERS)] if place % 2 else {}
    options["compression__downlink"] = ("raw32", "raw32", "int8")[place % 3]
    if place % 7 == 3:
        options |= {"verification__fallback": "skip", "verification__halvings": 2}
    if place % 6 == 1:
        options["round__evaluate_every"] = 1
    return options


def attack(federation: HostileFederation, number: int, count: int, *, may_restart: bool) -> None:
    """Play this many rounds; the number also seeds the draws."""
    played = 0

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def play(case: HostileUpdate) -> None:
        nonlocal played
        played += 1
        note(f"round {federation.fleet.version()}: {case}")
        federation.play(case, restart=may_restart and played % 40 == 6)

    play()
    for _ in range(6):  # until the model would exceed float32, if nothing bounds the updates
        federation.play(HostileUpdate(filled(HUGE), pb.TrainReport(**ordinary_report)))
    assert played >= count, "hypothesis has no more cases"
    federation.check_state()
    print(f"{played} rounds: {federation.outcomes}")  # shown by pytest -s


@pytest.mark.slow
@pytest.mark.parametrize("rule", BUILT_IN)
def test_one_client_cannot_harm_the_federation(rule: str, tmp_path: Path) -> None:
    number = list(BUILT_IN).index(rule)
    options = settings_for(number)
    with hostile_federation(tmp_path, rule__name=rule, **options) as federation:
        attack(federation, number, CASES_PER_RULE, may_restart=options["durability"] == "update")


@pytest.mark.parametrize("rule", SHORT)
def test_one_client_cannot_harm_the_federation_short_version(rule: str, tmp_path: Path) -> None:
    with hostile_federation(tmp_path, rule__name=rule) as federation:
        attack(federation, list(SHORT).index(rule), SHORT[rule], may_restart=True)
