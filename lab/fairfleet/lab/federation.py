"""What a simulation is of: clients, a model, a rule, a plan, and what may go wrong; and who trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fairfleet.client.torch import TorchTask
from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.tensors import Model
from fairfleet.lab.batched import BatchedTrainer
from fairfleet.lab.behaviour import Behaviour
from fairfleet.lab.clients import ClientData
from fairfleet.lab.coding import Coded
from fairfleet.lab.cohort import FleetData, Served, Trainer
from fairfleet.lab.perceptron import Perceptron
from fairfleet.lab.sequential import SequentialTrainer
from fairfleet.server.admission import Admission, Finding
from fairfleet.server.diagnostics import Diagnostics
from fairfleet.server.privacy import PrivacySettings
from fairfleet.server.rules import Recipe
from fairfleet.server.selection import Selection
from fairfleet.server.settings import PLAN_FIELDS
from fairfleet.server.verification import Terms

Engine = Literal["auto", "batched", "sequential"]


@dataclass(frozen=True)
class Federation:
    """What is to be simulated."""

    clients: Sequence[ClientData]
    model: Callable[[], nn.Module]
    recipe: Recipe
    plan: Plan = field(default_factory=Plan)
    rounds: int = 100
    clients_per_round: int = 0  # 0: all
    selection: Selection = "uniform"
    seed: int = 0
    evaluate_every: int = 10  # rounds; the last is evaluated too; 0: only the last
    verification: Terms | None = None  # of every step, by the round's clients; a rule may search the line by itself
    behaviour: Behaviour = field(default_factory=Behaviour)
    admission: Admission = field(default_factory=Admission)
    codec: str = "raw32"
    error_feedback: bool = True
    prediction: bool = True
    learning_rate_decay: float = 1.0  # of the clients' rate, per round
    loss: Literal["before", "after"] = "before"  # which loss the rule is told; after training: as easyFL had it
    loss_total: bool = False  # the sum over the samples instead of their mean, as some papers' q-FedAvg has it
    judged: Literal["last", "average"] = "last"  # the newest model, or the mean of all so far (AFL)
    privacy: PrivacySettings | None = None
    engine: Engine = "auto"
    workers: int = 0  # 0: as many as there are cores
    initial: Model | None = None  # None: model() under the seed
    scratch: Path | None = None  # for a history larger than memory; None: a temporary folder


@dataclass(frozen=True)
class RoundTold:
    """What one round did."""

    round: int
    clients: tuple[str, ...]  # whose update counts
    loss: float  # mean over all who delivered, on the received model
    diagnostics: Diagnostics | None  # None: nobody delivered
    served: Served | None = None  # after the round, where it was evaluated
    improved: float | None = None  # share of the round's clients whose training loss fell by it; when evaluated
    factor: float | None = None  # of the step that was taken, where it was tried before; 0: none was
    findings: tuple[Finding, ...] = ()  # of admission
    coded: Coded | None = None  # what a lossy codec did to the updates


def initial_model(build: Callable[[], nn.Module], seed: int) -> Model:
    """As `fairfleet init` would write it, had torch been seeded so."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
    return TorchTask(
        lambda: module, train=(torch.zeros(1, 1), torch.zeros(1)), loss=nn.functional.mse_loss
    ).initial_model()


def plan_of(plan: Plan, recipe: Recipe) -> Plan:
    """The plan, with what the rule asks of local training."""
    return plan.model_copy(update={PLAN_FIELDS[key]: value for key, value in recipe.plan.items()})


def trainer_for(federation: Federation, data: FleetData, model: Model, workers: int) -> Trainer:
    """Batched where the model is a dense network; elsewhere, or if asked, one client after another."""
    with torch.random.fork_rng(devices=[]):
        network = Perceptron.of(federation.model(), model.signature)
    if network is not None and federation.engine != "sequential":
        return BatchedTrainer(network, data, workers)
    if federation.engine == "batched":
        raise UsageError("this model is not a plain dense network, so it cannot be trained batched; use engine auto")
    return SequentialTrainer(federation.model, data, workers)
