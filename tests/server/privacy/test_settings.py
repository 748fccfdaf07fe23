"""Privacy settings: which rules and options they can be combined with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fairfleet.common.privacy import model_refusal
from fairfleet.common.tensors import Model
from fairfleet.server.gram import Gram
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.rules import Cohort, Report, listings, recipe
from fairfleet.server.settings import ServerSettings
from tests.support.samples.privacy import CLIENT, SERVER


def settings_with(rule: str, privacy: dict[str, Any], **more: Any) -> ServerSettings:
    """Return settings with this rule and privacy."""
    return ServerSettings.model_validate({"rule": {"name": rule}, "privacy": privacy} | more)


@pytest.mark.parametrize("rule", listings())
def test_noise_at_the_server_is_refused_for_every_rule_that_depends_on_updates(rule: str) -> None:
    with pytest.raises(ValidationError) as error:
        settings_with(rule, SERVER)
    for words in (repr(rule), "privacy.where: client", "weighting: uniform"):
        assert words in str(error.value)


@pytest.mark.parametrize("rule", [name for name in listings() if name != "fedmdfg"])
def test_noise_at_the_client_works_with_every_rule(rule: str) -> None:
    settings_with(rule, CLIENT)
    settings_with(rule, CLIENT | {"reports": "noised"})


PLAIN = [
    name
    for name, listing in listings().items()
    if listing.parameters().get("weighting") == "samples"
]


@pytest.mark.parametrize(
    "rule", [name for name in PLAIN if recipe(name, weighting="uniform").rule.is_plain_mean()]
)
def test_noise_at_the_server_works_with_the_plain_mean(rule: str) -> None:
    ServerSettings.model_validate(
        {"rule": {"name": rule, "weighting": "uniform"}, "privacy": SERVER}
    )


def test_only_these_rules_are_plain_means() -> None:
    names = {name for name in PLAIN if recipe(name, weighting="uniform").rule.is_plain_mean()}
    assert names == {"fedavg", "fedprox", "ditto", "fedadam", "fedamsgrad", "fedyogi", "fedadagrad"}


@given(st.integers(1, 6), st.integers(0, 2**32))
def test_a_plain_mean_gives_all_clients_the_same_weight(clients: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((clients, 3)) * 10.0 ** draw.uniform(-6, 6, (clients, 1))
    reports = [
        Report(samples=float(draw.integers(1, 99)), loss=float(draw.uniform(0, 9)))
        for _ in range(clients)
    ]
    names = [f"client-{number}" for number in range(clients)]
    for rule in PLAIN:
        mean = recipe(rule, weighting="uniform").rule
        if mean.is_plain_mean():
            step = mean.step(Cohort(Gram((rows @ rows.T)[None]), names, reports), mean.initial())
            np.testing.assert_allclose(step.coefficients, np.full(clients, 1 / clients))


@pytest.mark.parametrize(
    ("rule", "privacy", "more", "words"),
    [
        (
            "fedavg",
            CLIENT | {"reports": "noised"},
            {"measure": "auc"},
            "left out of noised reports",
        ),
        ("fedmdfg", CLIENT | {"reports": "noised"}, {}, "clients try steps"),
        ("fedlf", CLIENT | {"reports": "noised"}, {"verification": {}}, "clients try steps"),
        ("fedavg", CLIENT | {"amplification": True}, {}, "noise at the server"),
        ("fedavg", CLIENT | {"cohort": 10}, {}, "noise at the server"),
        ("fedavg", CLIENT | {"noise_multiplier": 0.0, "max_epsilon": 3.0}, {}, "without noise"),
        ("fedavg", CLIENT | {"clip": 0.0}, {}, "greater than 0"),
        ("fedavg", CLIENT | {"delta": 1.0}, {}, "less than 1"),
    ],
)
def test_settings_that_cannot_be_guaranteed_are_refused(
    rule: str, privacy: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        settings_with(rule, privacy, **more)


@pytest.mark.parametrize("selection", ["samples", "least_recent", "power_of_choice"])
def test_amplification_is_refused_unless_the_selection_is_uniform(selection: str) -> None:
    given = {
        "rule": {"name": "fedavg", "weighting": "uniform"},
        "privacy": SERVER | {"amplification": True},
    }
    ServerSettings.model_validate(given)
    with pytest.raises(ValidationError, match="hides no client"):
        ServerSettings.model_validate(given | {"round": {"selection": selection}})


@pytest.mark.parametrize("admission", [{"norm": "clip"}, {"loss": "reject"}, {"samples": "cap"}])
def test_noise_at_the_server_is_refused_if_admission_changes_updates(
    admission: dict[str, str],
) -> None:
    given = {"rule": {"name": "fedavg", "weighting": "uniform"}, "privacy": SERVER}
    with pytest.raises(ValidationError, match="admission clips"):
        ServerSettings.model_validate(given | {"admission": admission})
    settings_with("fedavg", CLIENT, admission=admission)
    ServerSettings.model_validate(given | {"admission": dict.fromkeys(admission, "observe")})


def test_a_model_with_buffers_is_refused_and_they_are_named() -> None:
    weights = {"weight": np.zeros(3, np.float32)}
    buffers = {"norm.running_mean": np.zeros(2, np.float32), "norm.count": np.array(0)}
    why = model_refusal(Model.of(weights, buffers).signature)
    assert why is not None
    assert "norm.running_mean" in why
    assert "GroupNorm" in why
    assert model_refusal(Model.of(weights).signature) is None


def test_the_settings_say_what_epsilon_does_not_cover() -> None:
    plain, noised = (PrivacySettings(**CLIENT, reports=kind) for kind in ("uncovered", "noised"))
    for words in (
        "losses",
        "gradient norms",
        "sample counts",
        "evaluations",
        "epsilon does not cover them",
    ):
        assert words in plain.not_covered
    assert "sample counts" in noised.not_covered
    assert "the server and its operator see every update" in PrivacySettings(**SERVER).against
