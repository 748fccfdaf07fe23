"""Which clients of a fleet are slow, late or dishonest."""

from __future__ import annotations

import math

import pytest

from fairfleet.common.cli.settings import parse_assignment, read_model
from fairfleet.common.errors import BadSettings
from fairfleet.common.training_plan import Plan
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.simulation.behaviour import (
    Attack,
    Behaviour,
    FleetBehaviour,
    LateJoiners,
    Stragglers,
)


def names(count: int) -> list[str]:
    return [f"client-{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("share", "fleet", "expected"),
    [(0.0, 4, 0), (0.1, 4, 1), (0.05, 10, 1), (1e-9, 1, 1), (0.1, 30, 3), (1.0, 4, 4)],
)
def test_a_share_above_0_is_at_least_one_client(share: float, fleet: int, expected: int) -> None:
    everyone = names(fleet)
    conduct = FleetBehaviour(
        Behaviour(
            stragglers=Stragglers(share=share),
            late=LateJoiners(share=share, by_round=3),
            attacks=(Attack(kind="sign_flip", clients=share),),
        ),
        everyone,
        seed=0,
    )
    assert len(conduct.dishonest) == expected
    assert sum(conduct.plan(Plan(steps=7), name, 0).steps == 0 for name in everyone) == expected
    assert len(set(everyone) - set(conduct.present(0))) == expected


@pytest.mark.parametrize("strength", [".inf", ".nan"])
def test_a_strength_that_is_no_number_is_refused_and_located(strength: str) -> None:
    flags = dict(
        [parse_assignment(f"behaviour.attacks=[{{kind: sign_flip, strength: {strength}}}]")]
    )
    with pytest.raises(
        BadSettings, match=r"behaviour\.attacks\.0\.strength: Input should be a finite number"
    ):
        read_model(Experiment, None, flags)


def test_random_attackers_change_the_updates_of_a_small_fleet() -> None:
    conduct = FleetBehaviour(
        Behaviour(attacks=(Attack(kind="sign_flip", strength=10),)), names(4), seed=0
    )
    factors = sorted(conduct.update_factor(name, 0) for name in conduct.names)
    assert factors == [-10.0, 1.0, 1.0, 1.0]
    assert all(map(math.isfinite, factors))


def test_an_attacker_of_every_round_is_certain_from_its_first_round_on_and_never_lost() -> None:
    attack = Attack(kind="loss_bias", clients=("client-1",), since_round=3, every_round=True)
    conduct = FleetBehaviour(Behaviour(dropout=1.0, attacks=(attack,)), names(4), seed=0)
    assert [conduct.certain(number) for number in (2, 3, 9)] == [
        frozenset(),
        frozenset({"client-1"}),
        frozenset({"client-1"}),
    ]
    assert [conduct.delivers("client-1", number) for number in (2, 3)] == [False, True]
    assert not conduct.delivers("client-0", 3)


def test_an_attacker_that_has_not_joined_is_not_certain() -> None:
    attack = Attack(kind="loss_bias", clients=1.0, every_round=True)
    late = LateJoiners(share=1.0, by_round=5)
    conduct = FleetBehaviour(Behaviour(late=late, attacks=(attack,)), names(4), seed=0)
    assert conduct.certain(0) == frozenset()
    assert conduct.certain(5) == frozenset(names(4))
