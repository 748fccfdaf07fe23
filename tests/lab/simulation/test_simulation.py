"""Properties of a simulation: repeatable results, and faults that happen as configured."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.training_plan import Plan
from fairfleet.lab.simulation import checkpoints, history_rows
from fairfleet.lab.simulation.behaviour import (
    Attack,
    Behaviour,
    FleetBehaviour,
    LateJoiners,
    Stragglers,
)
from fairfleet.lab.simulation.federation import initial_model
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.rounds.verification import VerificationPolicy
from fairfleet.server.rules import listings
from tests.support.samples.simulated_fleets import CLASSES, FEATURES, federation, fleet, mlp, run


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_the_same_seed_gives_the_same_bits(engine: str) -> None:
    makes = [
        federation("fedfv", engine=engine, clients_per_round=3, seed=seed, rounds=6)
        for seed in (5, 5, 6)
    ]
    first, again, different = (run(setup)[0].model.parameters for setup in makes)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - different).max() > 0.01


def test_a_given_initial_model_is_not_written_to() -> None:
    initial = initial_model(mlp, 3)
    before = initial.parameters.copy()
    run(federation(initial=initial))
    np.testing.assert_array_equal(initial.parameters, before)


@pytest.mark.parametrize("rule", sorted(listings()))
def test_every_rule_trains(rule: str) -> None:
    simulation, rounds = run(
        federation(rule, rounds=12, plan=Plan(epochs=1, batch_size=8, learning_rate=0.05))
    )
    assert np.isfinite(simulation.model.parameters).all()
    assert rounds[-1].scores is not None
    assert np.isfinite(rounds[-1].scores.accuracy).all()
    assert rounds[-1].loss <= rounds[0].loss


@pytest.mark.parametrize("rule", ["fedavg", "fedfv", "fedlf", "fedmdfg"])
@pytest.mark.parametrize("in_file", [False, True], ids=["in memory", "in a file"])
def test_a_resumed_simulation_equals_an_uninterrupted_one(
    rule: str, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_rows, "IN_MEMORY_BYTES", 0 if in_file else 1 << 20)
    setup = federation(
        rule, rounds=8, clients_per_round=2, parameters={"tau": 3} if rule == "fedfv" else {}
    )
    uninterrupted, _ = run(setup)
    simulation = Simulation(setup)
    for round_result in simulation.rounds():
        if round_result.round == 4:
            break
    assert [round_result.round for round_result in simulation.rounds()] == [5, 6, 7]
    np.testing.assert_array_equal(simulation.model.parameters, uninterrupted.model.parameters)


def test_verified_steps_depend_on_reported_losses() -> None:
    """As on the server: decisions depend on reported losses, also if they are false."""
    lie = Behaviour(attacks=(Attack(kind="loss_scaling", clients=0.99, strength=0.0),))
    terms = VerificationPolicy(halvings=2, threshold=1.0, fallback="skip")
    for honest, factor in ((Behaviour(), 1.0), (lie, 0.0)):
        _, rounds = run(
            federation(
                rounds=2,
                verification=terms,
                behaviour=honest,
                plan=Plan(epochs=1, learning_rate=0.01),
            )
        )
        assert [round_result.factor for round_result in rounds] == [factor, factor]


def test_only_clients_whose_update_counts_are_reported() -> None:
    loud = Behaviour(
        attacks=(Attack(kind="update_scaling", clients=("client-0",), strength=1000.0),)
    )
    _, rounds = run(
        federation(behaviour=loud, admission=AdmissionSettings(norm="reject"), rounds=2)
    )
    assert all(
        round_result.clients == ("client-1", "client-2", "client-3", "client-4")
        for round_result in rounds
    )


def test_evaluation_happens_when_due_and_at_the_end() -> None:
    _, rounds = run(federation(rounds=7, evaluate_every=3))
    assert [round_result.round for round_result in rounds if round_result.scores] == [2, 5, 6]
    assert all(round_result.improved is not None for round_result in rounds if round_result.scores)
    _, rounds = run(federation(rounds=4, evaluate_every=0))
    assert [round_result.round for round_result in rounds if round_result.scores] == [3]


def test_clients_may_be_drawn_by_any_policy_of_the_server() -> None:
    _, rounds = run(
        federation(rounds=10, clients_per_round=1, selection="least_recent", evaluate_every=0)
    )
    first, second = rounds[:5], rounds[5:]
    assert (
        len({round_result.clients for round_result in first})
        == len({round_result.clients for round_result in second})
        == 5
    )
    _, rounds = run(
        federation(rounds=10, clients_per_round=2, selection="power_of_choice", evaluate_every=0)
    )
    assert all(len(round_result.clients) == 2 for round_result in rounds)


class NeverDelivers(FleetBehaviour):
    """A fleet of five clients of which the first never delivers."""

    def delivers(self, client: str, round_number: int) -> bool:
        return client != "client-0"


def by_turn(rounds: int = 60) -> Simulation:
    setup = federation(
        rounds=rounds, clients_per_round=2, selection="least_recent", evaluate_every=0
    )
    simulation = Simulation(setup)
    simulation.behaviour = NeverDelivers(
        Behaviour(), [client.name for client in setup.clients], setup.seed
    )
    return simulation


def test_a_client_that_never_delivers_does_not_displace_others() -> None:
    simulation = by_turn()
    selected = Counter(
        name
        for round_result in simulation.rounds()
        for name in simulation.behaviour.names
        if simulation.attendance.of(name).last_selected == round_result.round
    )
    broken = selected.pop("client-0")
    assert 0 < broken == simulation.attendance.of("client-0").missed < 8
    assert max(selected.values()) - min(selected.values()) <= 2


def test_a_checkpoint_stores_selections_and_missed_ones(tmp_path: Path) -> None:
    uninterrupted, first, second, old = (by_turn() for _ in range(4))
    expected = [round_result.clients for round_result in uninterrupted.rounds()]
    rounds = first.rounds()
    before = [next(rounds).clients for _ in range(20)]
    checkpoints.save(tmp_path / "one.npz", first, {})
    assert first.attendance.of("client-0").missed > 1
    assert checkpoints.restore(tmp_path / "one.npz", second) == {}
    assert second.attendance.dump() == first.attendance.dump()
    assert before + [round_result.clients for round_result in second.rounds()] == expected
    np.testing.assert_array_equal(second.model.parameters, uninterrupted.model.parameters)

    with np.load(tmp_path / "one.npz") as file:
        arrays = dict(file)
    facts = json.loads(str(arrays.pop("facts")))
    del facts["attendance"]  # an older version stored none
    np.savez(tmp_path / "old.npz", facts=np.array(json.dumps(facts)), **arrays)
    assert checkpoints.restore(tmp_path / "old.npz", old) == {}
    assert old.attendance.dump() == {}, (
        "no selection was missed; the last delivery counts as the last selection"
    )
    assert [round_result.round for round_result in old.rounds()][-1] == 59


def test_dropouts_are_lost_for_their_round_only() -> None:
    setup = federation(rounds=40, evaluate_every=0, behaviour=Behaviour(dropout=0.5))
    _, rounds = run(setup)
    counts = [len(round_result.clients) for round_result in rounds]
    assert 60 < sum(counts) < 140  # out of 200
    assert {name for round_result in rounds for name in round_result.clients} == {
        client.name for client in setup.clients
    }


def test_a_round_that_nobody_delivers_leaves_the_model_as_it_is() -> None:
    setup = federation(rounds=3, behaviour=Behaviour(dropout=1.0))
    simulation, rounds = run(setup)
    np.testing.assert_array_equal(simulation.model.parameters, initial_model(mlp, 0).parameters)
    assert all(
        not round_result.clients and round_result.diagnostics is None for round_result in rounds
    )


def test_late_joiners_are_not_selected_before_they_join() -> None:
    setup = federation(
        rounds=12, evaluate_every=0, behaviour=Behaviour(late=LateJoiners(share=0.6, by_round=8))
    )
    _, rounds = run(setup)
    counts = [len(round_result.clients) for round_result in rounds]
    assert counts == sorted(counts)
    assert counts[0] == 2
    assert counts[-1] == 5


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_stragglers_train_another_number_of_epochs(engine: str) -> None:
    pace = Behaviour(stragglers=Stragglers(share=1.0, epochs=(1, 4)))
    setup = federation(
        "fednova", behaviour=pace, rounds=4, engine=engine, plan=Plan(epochs=2, batch_size=8)
    )
    simulation, _ = run(setup)
    counts = {
        simulation.behaviour.plan(setup.plan, "client-0", number).epochs for number in range(40)
    }
    assert counts == {1, 2, 3, 4}


@pytest.mark.slow
def test_both_trainers_have_the_same_faults() -> None:
    troubles = Behaviour(
        dropout=0.2,
        stragglers=Stragglers(share=0.5),
        late=LateJoiners(share=0.4, by_round=3),
        attacks=(
            Attack(kind="label_noise", strength=0.5, clients=0.4),
            Attack(kind="sign_flip", clients=("client-1",)),
        ),
    )
    models = [
        run(federation(behaviour=troubles, rounds=6, engine=engine))[0].model.parameters
        for engine in ("batched", "sequential")
    ]
    np.testing.assert_allclose(*models, rtol=1e-3, atol=1e-5)


def test_an_attacked_update_is_what_is_aggregated() -> None:
    first, twice, flipped = (
        run(
            federation(
                rounds=1, initial=initial_model(mlp, 3), behaviour=Behaviour(attacks=attacks)
            )
        )[0].model
        for attacks in (
            (),
            (Attack(kind="update_scaling", clients=1.0, strength=2.0),),
            (Attack(kind="sign_flip", clients=1.0),),
        )
    )
    start = initial_model(mlp, 3).parameters
    np.testing.assert_allclose(
        twice.parameters - start, 2 * (first.parameters - start), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        flipped.parameters - start, start - first.parameters, rtol=1e-4, atol=1e-6
    )


def test_a_false_loss_affects_only_rules_that_use_losses() -> None:
    lie = Behaviour(
        attacks=(Attack(kind="loss_bias", clients=("client-1",), strength=100.0, since_round=2),)
    )
    for rule, moved in (("fedmgda_plus", False), ("qfedavg", True), ("afl", True)):
        honest, biased = (
            run(federation(rule, rounds=5, behaviour=behaviour))[0].model
            for behaviour in (Behaviour(), lie)
        )
        assert bool(np.abs(honest.parameters - biased.parameters).max() > 1e-4) is moved


@pytest.mark.parametrize("per_round", [1, 3])
def test_an_attacker_of_every_round_takes_a_place_of_the_cohort(per_round: int) -> None:
    attacks = (Attack(kind="loss_bias", clients=("client-1",), strength=5.0, every_round=True),)
    _, rounds = run(
        federation(clients_per_round=per_round, rounds=12, behaviour=Behaviour(attacks=attacks))
    )
    assert all("client-1" in result.clients for result in rounds)
    assert {len(result.clients) for result in rounds} == {per_round}
    others = {client for result in rounds for client in result.clients} - {"client-1"}
    assert len(others) > per_round or per_round == 1


def test_an_attack_by_unknown_clients_is_refused() -> None:
    with pytest.raises(UsageError, match="no clients"):
        run(
            federation(
                behaviour=Behaviour(attacks=(Attack(kind="sign_flip", clients=("mallory",)),))
            )
        )


def test_a_coarser_codec_moves_the_model_a_little() -> None:
    for codec in ("fp16", "int8", "int8+zstd"):
        exact, coarse = (
            run(federation(codec=codec_name))[0].model.parameters for codec_name in ("raw32", codec)
        )
        assert 0 < np.abs(exact - coarse).max() < 5e-2


def test_error_feedback_sends_later_what_a_codec_omitted() -> None:
    setup = partial(
        federation,
        rounds=30,
        codec="topk:0.1",
        plan=Plan(epochs=1, batch_size=0, learning_rate=0.02),
    )
    losses = [
        run(setup(error_feedback=feedback, prediction=False))[1][-1].loss
        for feedback in (True, False)
    ]
    assert losses[0] < losses[1]


def test_the_average_of_all_models_is_evaluated_if_configured() -> None:
    setup = federation("afl", rounds=3, judged="average")
    simulation, _ = run(setup)
    models = [run(federation("afl", rounds=count))[0].model.parameters for count in (1, 2, 3)]
    np.testing.assert_allclose(
        simulation.evaluated_model().parameters, np.mean(models, 0), rtol=1e-6
    )


def test_each_round_trains_with_the_decayed_rate() -> None:
    """One step of all samples moves the model in proportion to the rate."""
    initial = initial_model(mlp, 3)

    def trained(decay: float, rounds: int) -> np.ndarray:
        plan = Plan(epochs=1, batch_size=0, learning_rate=0.1, learning_rate_decay=decay)
        return run(federation(plan=plan, rounds=rounds, initial=initial))[0].model.parameters

    first = trained(1.0, 1)
    np.testing.assert_array_equal(trained(0.25, 1), first)
    constant, decayed = trained(1.0, 2) - first, trained(0.25, 2) - first
    assert np.abs(constant).max() > 1e-3
    np.testing.assert_allclose(decayed, 0.25 * constant, rtol=1e-3, atol=1e-6)


def test_a_diverging_training_is_reported() -> None:
    with pytest.raises(TaskFailed, match="diverged"):
        run(federation(rounds=30, plan=Plan(epochs=20, batch_size=8, learning_rate=1e20)))


def test_a_history_in_a_file_gives_the_same_model_as_one_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = partial(federation, "fedlf", clients=fleet((12,) * 9), clients_per_round=2, rounds=12)
    in_memory = run(setup())[0].model.parameters.copy()
    monkeypatch.setattr(history_rows, "IN_MEMORY_BYTES", 0)
    np.testing.assert_array_equal(run(setup())[0].model.parameters, in_memory)


def test_models_with_buffers_are_trained_too() -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES)
        )

    simulation, _ = run(federation(model=model))
    assert np.abs(simulation.model.buffers).max() > 0
    assert simulation.model.counters.max() > 0


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_a_verified_step_is_halved_until_enough_losses_fall(engine: str) -> None:
    far = Plan(epochs=1, batch_size=0, learning_rate=20.0)  # one step, much too long
    terms = VerificationPolicy(halvings=8, threshold=1.0, fallback="skip")
    setup = federation(engine=engine, plan=far, verification=terms, rounds=6, evaluate_every=1)
    _, results = run(setup)
    assert all(result.factor in (0.0, *(2.0**-k for k in range(9))) for result in results)
    assert any(0 < (result.factor or 0) < 1 for result in results)
    assert all(result.improved == 1.0 for result in results)
    assert all(result.strictly_improved == (1.0 if result.factor else 0.0) for result in results)


def test_a_skipped_step_changes_neither_model_nor_state() -> None:
    terms = VerificationPolicy(halvings=0, threshold=1.0, fallback="skip")
    setup = federation(
        "fedadam",
        parameters={"eta": 1000.0},
        verification=terms,
        rounds=2,
        initial=initial_model(mlp, 3),
    )
    simulation, results = run(setup)
    assert [result.factor for result in results] == [0.0, 0.0]
    np.testing.assert_array_equal(simulation.model.parameters, initial_model(mlp, 3).parameters)
    assert simulation.state.optimizer is None


def test_every_loss_falls_if_the_line_search_of_fedmdfg_succeeds() -> None:
    searched, plain = (
        run(federation("fedmdfg", rounds=5, evaluate_every=1, parameters={"line_search": search}))[
            1
        ]
        for search in (True, False)
    )
    assert all(result.factor is not None for result in searched)
    assert all(result.factor is None for result in plain)
    assert searched[-1].loss < plain[-1].loss
