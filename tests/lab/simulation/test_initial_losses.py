"""A simulated client that joins late is divided by its loss on the initial model, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairfleet.lab.simulation import checkpoints
from fairfleet.lab.simulation.behaviour import Attack, Behaviour
from fairfleet.lab.simulation.federation import Engine, trainer_for
from fairfleet.lab.simulation.simulation import Simulation
from tests.support.samples.simulated_fleets import federation, run

LATE = {"rounds": 6, "clients_per_round": 2}


def losses_on_initial_model(engine: Engine = "sequential") -> dict[str, float]:
    setup = federation("adafedadam", engine=engine)
    simulation = Simulation(setup)
    names = simulation.data.names
    trainer = trainer_for(setup, simulation.data, simulation.model, 1)
    try:
        losses = trainer.losses(simulation.model, range(len(names)))
    finally:
        trainer.close()
    return dict(zip(names, losses, strict=True))


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_first_losses_of_all_clients_are_those_of_the_initial_model(engine: Engine) -> None:
    first = run(federation("adafedadam", engine=engine, **LATE))[0].participation.first_losses
    assert len(first) > LATE["clients_per_round"]
    expected = losses_on_initial_model(engine)
    assert first == pytest.approx({client: expected[client] for client in first}, rel=1e-6)


def test_losses_at_the_first_participation_are_others_for_late_clients() -> None:
    """The former reading, which is an option: the model had been trained before."""
    setup = federation("adafedadam", parameters={"reference": "first"}, **LATE)
    first, expected = run(setup)[0].participation.first_losses, losses_on_initial_model()
    same = [client for client, loss in first.items() if loss == pytest.approx(expected[client])]
    assert len(same) == LATE["clients_per_round"]
    assert len(first) > len(same)


def test_an_attacker_reports_both_losses_in_the_same_way() -> None:
    attack = Attack(kind="loss_scaling", clients=1.0, strength=10.0)
    setup = federation("adafedadam", behaviour=Behaviour(attacks=(attack,)), **LATE)
    first, expected = run(setup)[0].participation.first_losses, losses_on_initial_model()
    assert first == pytest.approx({client: 10 * expected[client] for client in first}, rel=1e-6)


def test_a_run_that_continues_from_a_checkpoint_measures_on_the_same_model(tmp_path: Path) -> None:
    whole, _ = run(federation("adafedadam", **LATE))
    begun = Simulation(federation("adafedadam", **LATE))
    rounds = begun.rounds()
    next(rounds)
    checkpoints.save(tmp_path / "one.npz", begun, {})
    rounds.close()
    continued = Simulation(federation("adafedadam", **LATE))
    assert checkpoints.restore(tmp_path / "one.npz", continued) == {}
    for _ in continued.rounds():
        pass
    assert continued.participation.first_losses == whole.participation.first_losses
    assert continued.model.parameters.tobytes() == whole.model.parameters.tobytes()
