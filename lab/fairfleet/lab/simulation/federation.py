"""The description of a simulated federation, the result of a round, and the choice of a trainer.

A `Federation` holds the clients' data, the model, the rule, the plan and the faults to simulate.
It is a plain value: `Simulation` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from fairfleet.client.torch import TorchTask
from fairfleet.client.training.torch_measures import NamedMeasures
from fairfleet.common.codecs import FeedbackSetting
from fairfleet.common.errors import UsageError
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.simulation.batched_trainer import BatchedTrainer
from fairfleet.lab.simulation.behaviour import Behaviour
from fairfleet.lab.simulation.compression import CompressionLoss
from fairfleet.lab.simulation.dense_network import DenseNetwork
from fairfleet.lab.simulation.sequential_trainer import SequentialTrainer
from fairfleet.lab.simulation.trainer import ClientScores, FleetData, Trainer
from fairfleet.server.aggregation.admission import AdmissionFinding, AdmissionSettings
from fairfleet.server.aggregation.diagnostics import Diagnostics, DiagnosticsSetting
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.rounds.selection import Selection
from fairfleet.server.rounds.verification import VerificationPolicy
from fairfleet.server.rules import Recipe

Engine = Literal["auto", "batched", "sequential"]


@dataclass(frozen=True)
class Federation:
    """The federation to simulate."""

    clients: Sequence[ClientData]
    model: Callable[[], nn.Module]
    recipe: Recipe
    plan: Plan = field(default_factory=Plan)
    rounds: int = 100
    clients_per_round: int = 0  # 0: all
    selection: Selection = "uniform"
    seed: int = 0
    evaluate_every: int = 10  # rounds; the last is evaluated too; 0: only the last
    # If set, the round's clients verify every step. A rule may also search the line by itself.
    verification: VerificationPolicy | None = None
    behaviour: Behaviour = field(default_factory=Behaviour)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    diagnostics: DiagnosticsSetting = "auto"
    codec: str = "raw32"
    error_feedback: FeedbackSetting = "auto"
    prediction: bool = True
    # The loss that the rule receives: before local training, or after it as in easyFL's code.
    loss: Literal["before", "after"] = "before"
    # The rule receives the sum over the samples instead of the mean, as in some papers' q-FedAvg.
    loss_total: bool = False
    judged: Literal["last", "average"] = "last"  # the newest model, or the mean of all so far (AFL)
    privacy: PrivacySettings | None = None
    measure: str = "accuracy"  # by which the model is judged: accuracy, loss or one of `measures`
    measures: NamedMeasures | None = None  # further figures of each client's test outputs
    engine: Engine = "auto"
    workers: int = 0  # 0: as many as there are cores
    initial: Model | None = None  # None: model() under the seed
    scratch: Path | None = None  # for a history larger than memory; None: a temporary folder


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one round."""

    round: int
    clients: tuple[str, ...]  # those whose updates were aggregated
    loss: float  # mean over all clients that delivered, on the received model
    diagnostics: Diagnostics | None  # None if no client delivered
    scores: ClientScores | None = None  # after the round, if it was evaluated
    # Share of the round's clients whose training loss did not rise, and of those whose training
    # loss fell; None if the round was not evaluated.
    improved: float | None = None
    strictly_improved: float | None = None
    # Part of the step that was taken, if the clients verified it; 0 if the step was skipped.
    factor: float | None = None
    findings: tuple[AdmissionFinding, ...] = ()  # of admission
    compression: CompressionLoss | None = None  # what a lossy codec did to the updates

    def with_improvement(self, before: Sequence[float], after: Sequence[float]) -> RoundResult:
        """Return this outcome with the shares of clients whose loss did not rise, and fell."""
        old, new = np.asarray(before), np.asarray(after)  # may be infinite
        return replace(
            self,
            improved=float(np.mean(new <= old)),
            strictly_improved=float(np.mean(new < old)),
        )


def initial_model(build: Callable[[], nn.Module], seed: int) -> Model:
    """Return the model that `fairfleet init` would write if torch had this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
    return TorchTask(
        lambda: module, train=(torch.zeros(1, 1), torch.zeros(1)), loss=nn.functional.mse_loss
    ).initial_model()


def trainer_for(federation: Federation, data: FleetData, model: Model, workers: int) -> Trainer:
    """Return a batched trainer for a dense network, and a sequential one for other models.

    The engine "sequential" always gets a sequential trainer. Raise UsageError if the engine is
    "batched" and the model is no plain dense network.
    """
    with torch.random.fork_rng(devices=[]):
        network = DenseNetwork.of(federation.model(), model.signature)
    if federation.measures is None and network is not None and federation.engine != "sequential":
        return BatchedTrainer(network, data, workers)
    if federation.engine == "batched":
        raise UsageError(
            "measures of your own and models that are no plain dense networks cannot be trained "
            "batched; use engine auto"
        )
    return SequentialTrainer(
        federation.model, data, workers, federation.measure, federation.measures
    )
