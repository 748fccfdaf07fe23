"""What a simulation promises beside being the network's: repeatability, and troubles that happen as they are told."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from torch import nn

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.plan import Plan
from fairfleet.lab import shelves
from fairfleet.lab.behaviour import Attack, Behaviour, LateJoiners, Stragglers
from fairfleet.lab.federation import initial_model
from fairfleet.lab.simulation import Simulation
from fairfleet.server.admission import Admission
from fairfleet.server.rules import listings
from fairfleet.server.verification import Terms
from tests.lab.fleets import CLASSES, FEATURES, federation, fleet, mlp, run


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_the_same_seed_gives_the_same_bits(engine: str) -> None:
    makes = [federation("fedfv", engine=engine, clients_per_round=3, seed=seed, rounds=6) for seed in (5, 5, 6)]
    one, again, other = (run(made)[0].model.parameters for made in makes)
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01


def test_a_given_initial_model_is_not_written_to() -> None:
    initial = initial_model(mlp, 3)
    before = initial.parameters.copy()
    run(federation(initial=initial))
    np.testing.assert_array_equal(initial.parameters, before)


@pytest.mark.parametrize("rule", sorted(listings()))
def test_every_rule_trains(rule: str) -> None:
    simulation, rounds = run(federation(rule, rounds=12, plan=Plan(epochs=1, batch_size=8, learning_rate=0.05)))
    assert np.isfinite(simulation.model.parameters).all()
    assert rounds[-1].served is not None
    assert np.isfinite(rounds[-1].served.accuracy).all()
    assert rounds[-1].loss <= rounds[0].loss


@pytest.mark.parametrize("rule", ["fedavg", "fedfv", "fedlf", "fedmdfg"])
@pytest.mark.parametrize("in_file", [False, True], ids=["in memory", "in a file"])
def test_a_simulation_that_is_left_goes_on_as_if_it_had_not_been(
    rule: str, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "IN_MEMORY_BYTES", 0 if in_file else 1 << 20)
    made = federation(rule, rounds=8, clients_per_round=2, parameters={"tau": 3} if rule == "fedfv" else {})
    whole, _ = run(made)
    simulation = Simulation(made)
    for told in simulation.rounds():
        if told.round == 4:
            break
    assert [told.round for told in simulation.rounds()] == [5, 6, 7]
    np.testing.assert_array_equal(simulation.model.parameters, whole.model.parameters)


def test_verified_steps_are_held_against_the_losses_that_were_told() -> None:
    """As on the server: a fleet that lies about its losses is served by what it said."""
    lie = Behaviour(attacks=(Attack(kind="loss_scaling", clients=0.99, strength=0.0),))
    terms = Terms(halvings=2, threshold=1.0, fallback="skip")
    for honest, factor in ((Behaviour(), 1.0), (lie, 0.0)):
        _, rounds = run(
            federation(rounds=2, verification=terms, behaviour=honest, plan=Plan(epochs=1, learning_rate=0.01))
        )
        assert [told.factor for told in rounds] == [factor, factor]


def test_only_those_whose_update_counts_are_told_of() -> None:
    loud = Behaviour(attacks=(Attack(kind="update_scaling", clients=("client-0",), strength=1000.0),))
    _, rounds = run(federation(behaviour=loud, admission=Admission(norm="reject"), rounds=2))
    assert all(told.clients == ("client-1", "client-2", "client-3", "client-4") for told in rounds)


def test_evaluation_happens_when_asked_and_at_the_end() -> None:
    _, rounds = run(federation(rounds=7, evaluate_every=3))
    assert [told.round for told in rounds if told.served] == [2, 5, 6]
    assert all(told.improved is not None for told in rounds if told.served)
    _, rounds = run(federation(rounds=4, evaluate_every=0))
    assert [told.round for told in rounds if told.served] == [3]


def test_clients_may_be_drawn_by_any_policy_of_the_server() -> None:
    _, rounds = run(federation(rounds=10, clients_per_round=1, selection="least_recent", evaluate_every=0))
    first, second = rounds[:5], rounds[5:]
    assert len({told.clients for told in first}) == len({told.clients for told in second}) == 5
    _, rounds = run(federation(rounds=10, clients_per_round=2, selection="power_of_choice", evaluate_every=0))
    assert all(len(told.clients) == 2 for told in rounds)


def test_dropouts_are_lost_for_their_round_only() -> None:
    made = federation(rounds=40, evaluate_every=0, behaviour=Behaviour(dropout=0.5))
    _, rounds = run(made)
    counts = [len(told.clients) for told in rounds]
    assert 60 < sum(counts) < 140  # of 200
    assert {name for told in rounds for name in told.clients} == {client.name for client in made.clients}


def test_a_round_that_nobody_delivers_leaves_the_model_as_it_is() -> None:
    made = federation(rounds=3, behaviour=Behaviour(dropout=1.0))
    simulation, rounds = run(made)
    np.testing.assert_array_equal(simulation.model.parameters, initial_model(mlp, 0).parameters)
    assert all(not told.clients and told.diagnostics is None for told in rounds)


def test_late_joiners_are_not_asked_before_they_join() -> None:
    made = federation(rounds=12, evaluate_every=0, behaviour=Behaviour(late=LateJoiners(share=0.6, by_round=8)))
    _, rounds = run(made)
    counts = [len(told.clients) for told in rounds]
    assert counts == sorted(counts)
    assert counts[0] == 2
    assert counts[-1] == 5


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_stragglers_train_another_number_of_epochs(engine: str) -> None:
    pace = Behaviour(stragglers=Stragglers(share=1.0, epochs=(1, 4)))
    made = federation("fednova", behaviour=pace, rounds=4, engine=engine, plan=Plan(epochs=2, batch_size=8))
    simulation, _ = run(made)
    counts = {simulation.conduct.plan(made.plan, "client-0", number).epochs for number in range(40)}
    assert counts == {1, 2, 3, 4}


def test_both_engines_meet_the_same_troubles() -> None:
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
        run(federation(rounds=1, initial=initial_model(mlp, 3), behaviour=Behaviour(attacks=attacks)))[0].model
        for attacks in (
            (),
            (Attack(kind="update_scaling", clients=1.0, strength=2.0),),
            (Attack(kind="sign_flip", clients=1.0),),
        )
    )
    start = initial_model(mlp, 3).parameters
    np.testing.assert_allclose(twice.parameters - start, 2 * (first.parameters - start), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flipped.parameters - start, start - first.parameters, rtol=1e-4, atol=1e-6)


def test_only_rules_that_listen_to_losses_are_moved_by_a_false_loss() -> None:
    lie = Behaviour(attacks=(Attack(kind="loss_bias", clients=("client-1",), strength=100.0, since_round=2),))
    for rule, moved in (("fedmgda_plus", False), ("qfedavg", True), ("afl", True)):
        honest, biased = (
            run(federation(rule, rounds=5, behaviour=behaviour))[0].model for behaviour in (Behaviour(), lie)
        )
        assert bool(np.abs(honest.parameters - biased.parameters).max() > 1e-4) is moved


def test_an_attack_by_nobody_we_know_is_refused() -> None:
    with pytest.raises(UsageError, match="no clients"):
        run(federation(behaviour=Behaviour(attacks=(Attack(kind="sign_flip", clients=("mallory",)),))))


def test_a_coarser_codec_moves_the_model_a_little() -> None:
    for codec in ("fp16", "int8", "int8+zstd"):
        exact, coarse = (run(federation(codec=one))[0].model.parameters for one in ("raw32", codec))
        assert 0 < np.abs(exact - coarse).max() < 5e-2


def test_error_feedback_sends_later_what_a_codec_left_out() -> None:
    made = partial(federation, rounds=30, codec="topk:0.1", plan=Plan(epochs=1, batch_size=0, learning_rate=0.02))
    losses = [run(made(error_feedback=feedback, prediction=False))[1][-1].loss for feedback in (True, False)]
    assert losses[0] < losses[1]


def test_the_average_of_all_models_is_judged_when_asked() -> None:
    made = federation("afl", rounds=3, judged="average")
    simulation, _ = run(made)
    models = [run(federation("afl", rounds=count))[0].model.parameters for count in (1, 2, 3)]
    np.testing.assert_allclose(simulation.judged_model().parameters, np.mean(models, 0), rtol=1e-6)


def test_a_training_that_diverges_says_so() -> None:
    with pytest.raises(TaskFailed, match="diverged"):
        run(federation(rounds=30, plan=Plan(epochs=20, batch_size=8, learning_rate=1e20)))


def test_a_history_in_a_file_gives_the_same_model_as_one_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = partial(federation, "fedlf", clients=fleet((12,) * 9), clients_per_round=2, rounds=12)
    in_memory = run(made())[0].model.parameters.copy()
    monkeypatch.setattr(shelves, "IN_MEMORY_BYTES", 0)
    np.testing.assert_array_equal(run(made())[0].model.parameters, in_memory)


def test_models_with_buffers_are_trained_too() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES))

    simulation, _ = run(federation(model=model))
    assert np.abs(simulation.model.buffers).max() > 0
    assert simulation.model.counters.max() > 0


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_a_verified_step_is_halved_until_enough_losses_fall(engine: str) -> None:
    far = Plan(epochs=1, batch_size=0, learning_rate=20.0)  # one step, much too long
    terms = Terms(halvings=8, threshold=1.0, fallback="skip")
    made = federation(engine=engine, plan=far, verification=terms, rounds=6, evaluate_every=1)
    _, told = run(made)
    assert all(one.factor in (0.0, *(2.0**-k for k in range(9))) for one in told)
    assert any(0 < (one.factor or 0) < 1 for one in told)
    assert all(one.improved == (1.0 if one.factor else 0.0) for one in told)


def test_a_step_that_is_skipped_leaves_model_and_memory_as_they_were() -> None:
    terms = Terms(halvings=0, threshold=1.0, fallback="skip")
    made = federation(
        "fedadam", parameters={"eta": 1000.0}, verification=terms, rounds=2, initial=initial_model(mlp, 3)
    )
    simulation, told = run(made)
    assert [one.factor for one in told] == [0.0, 0.0]
    np.testing.assert_array_equal(simulation.model.parameters, initial_model(mlp, 3).parameters)
    assert simulation.state.optimizer is None


def test_fedmdfg_searches_the_line_and_every_loss_falls_when_it_finds_one() -> None:
    searched, plain = (
        run(federation("fedmdfg", rounds=5, evaluate_every=1, parameters={"line_search": search}))[1]
        for search in (True, False)
    )
    assert all(one.factor is not None for one in searched)
    assert all(one.factor is None for one in plain)
    assert searched[-1].loss < plain[-1].loss
