"""FedCorr's stages before the rounds: find noisy clients, correct labels, train on clean clients.

First, the clients train one after another, each on the model of the one before, and report the
dimension of their predictions; the server splits them into clean and noisy ones, and noisy ones
correct labels. Then the clean clients train a model together, by which the noisy ones correct
labels again. The federation that comes out has the corrected labels and starts from that model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from os import cpu_count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fairfleet.client.training.torch_modules import parameters_and_buffers
from fairfleet.common.errors import TaskFailed
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.label_noise import (
    LabelCorrection,
    LabelReport,
    intrinsic_dimension,
    most_suspect,
    noisy_clients,
    relabelled,
    suspects,
    wrong_shares,
)
from fairfleet.lab.simulation.federation import Federation, initial_model, trainer_for
from fairfleet.lab.simulation.model_average import copy_model
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.lab.simulation.trainer import FleetData, Trainer, TrainRequest, Work
from fairfleet.server.rules import recipe

BATCH = 512  # samples per forward pass that only measures
ORDER = zlib.crc32(b"order of label correction")


class Corrected(NamedTuple):
    """A federation whose labels are corrected, and what was found on the way."""

    federation: Federation
    report: LabelReport


@dataclass
class Findings:
    """What is known about the clients, in the order of their names."""

    labels: list[NDArray[np.int64]]
    dimensions: NDArray[np.float64]  # sums over the iterations
    noisy: NDArray[np.bool_]
    levels: NDArray[np.float64]  # estimated noise levels


def label_report(clients: Sequence[ClientData]) -> LabelReport:
    """Return the shares of wrong labels of these clients, if their right labels are known."""
    ordered = _ordered(clients)
    return LabelReport(wrong=_wrong(ordered, [client.train_y for client in ordered]))


def correct_labels(federation: Federation, settings: LabelCorrection) -> Corrected:
    """Run FedCorr's first two stages, without faults, attacks or compression.

    Raise TaskFailed if training diverges.
    """
    clients = _ordered(federation.clients)
    first_model = copy_model(federation.initial or initial_model(federation.model, federation.seed))
    with torch.random.fork_rng(devices=[]):
        outputs = Outputs(federation.model())
    # The rate decays from the first round of the experiment on, and personal models begin with it.
    plan = federation.plan.model_copy(update={"learning_rate_decay": 1.0, "personal_lambda": 0.0})
    before = replace(federation, plan=plan)
    model, findings = _estimate(before, settings, FleetData.of(clients), first_model, outputs)
    clean = [c for c, level in enumerate(findings.levels) if level <= settings.clean_level]
    if settings.rounds and clean:
        model = _train_together(before, settings, _with_labels(clients, findings), clean, model)
        for client in np.flatnonzero(findings.noisy):
            probabilities = outputs.probabilities(model, clients[client].train_x)
            findings.labels[client] = relabelled(
                findings.labels[client], probabilities, settings.confidence
            )
    report = LabelReport(
        wrong=_wrong(clients, [client.train_y for client in clients]),
        corrected=_wrong(clients, findings.labels),
        estimated=tuple(round(float(level), 5) for level in findings.levels),
        noisy=tuple(int(client) for client in np.flatnonzero(findings.noisy)),
    )
    corrected = _with_labels(clients, findings)
    return Corrected(replace(federation, clients=corrected, initial=model), report)


class Outputs:
    """Class probabilities of any model of one architecture."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module.eval()

    def probabilities(self, model: Model, x: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probability of each class, one row per sample."""
        parameters, buffers = parameters_and_buffers(self._module)
        arrays = model.named()
        samples = torch.from_numpy(np.require(x, requirements=["C", "W"]))
        with torch.no_grad():
            for name, tensor in (parameters | buffers).items():
                tensor.copy_(torch.from_numpy(arrays[name]))
            outputs: list[Tensor] = [self._module(part) for part in torch.split(samples, BATCH)]
            return np.asarray(torch.cat(outputs).double().softmax(1).numpy())


# ---- first stage: one client after another -------------------------------------------------------


def _estimate(
    federation: Federation,
    settings: LabelCorrection,
    data: FleetData,
    model: Model,
    outputs: Outputs,
) -> tuple[Model, Findings]:
    """Return the model after all iterations, and what was found about the clients."""
    count = len(data.names)
    findings = Findings(
        [y.numpy().copy() for y in data.train.y],
        np.zeros(count),
        np.zeros(count, bool),
        np.zeros(count),
    )
    for iteration in range(settings.iterations):
        losses: dict[int, NDArray[np.float64]] = {}
        order = np.random.default_rng([federation.seed, ORDER, iteration]).permutation(count)
        with _trainer(federation, data.with_labels(findings.labels), model) as trainer:
            for client in map(int, order):
                plan = _plan(federation.plan, data.names[client], iteration)
                pull = 2.0 * settings.proximal * float(findings.levels[client])
                plan = plan.model_copy(update={"proximal_mu": plan.proximal_mu + pull})
                model = _trained(trainer, model, Work(client, plan), data.names[client])
                probabilities = outputs.probabilities(model, data.train.x[client].numpy())
                losses[client] = _losses(probabilities, findings.labels[client])
                findings.dimensions[client] += intrinsic_dimension(
                    probabilities, settings.neighbours
                )
        findings.noisy = noisy_clients(findings.dimensions)
        findings.levels = np.zeros(count)
        for client in map(int, np.flatnonzero(findings.noisy)):
            findings.levels[client] = float(suspects(losses[client]).mean())
            probabilities = outputs.probabilities(model, data.train.x[client].numpy())
            reviewed = most_suspect(
                losses[client], float(findings.levels[client]), settings.relabel_share
            )
            findings.labels[client] = relabelled(
                findings.labels[client], probabilities, settings.confidence, reviewed
            )
    return model, findings


def _plan(plan: Plan, client: str, iteration: int) -> Plan:
    """Return a client's plan in one iteration, with batches other than those of the rounds."""
    return plan.for_client(f"label correction/{client}", iteration)


def _trained(trainer: Trainer, model: Model, work: Work, name: str) -> Model:
    """Return the model after one client has trained it."""
    rows = np.empty((1, len(model.parameters)), np.float32)
    measures = trainer.train(model, [work], TrainRequest(), rows)[0]
    trained = copy_model(trainer.states()[0] if trainer.states() else model)
    trained.parameters[:] = model.parameters - rows[0]
    if not (np.isfinite(measures.loss) and np.isfinite(trained.parameters).all()):
        raise TaskFailed(
            f"the training of {name} in the label correction diverged. Try a smaller "
            "learning_rate in the plan, or a smaller proximal of label_correction."
        )
    return trained


def _losses(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the cross-entropy of each sample."""
    own = probabilities[np.arange(len(labels)), labels]
    return np.asarray(-np.log(np.maximum(own, np.finfo(np.float64).tiny)))


@contextmanager
def _trainer(federation: Federation, data: FleetData, model: Model) -> Iterator[Trainer]:
    trainer = trainer_for(federation, data, model, federation.workers or cpu_count() or 1)
    try:
        with threadpool_limits(1, "blas"):
            yield trainer
    finally:
        trainer.close()


# ---- second stage: the clean clients together ----------------------------------------------------


def _train_together(
    federation: Federation,
    settings: LabelCorrection,
    clients: Sequence[ClientData],
    clean: Sequence[int],
    model: Model,
) -> Model:
    """Return the model after rounds of FedAvg among the clean clients."""
    simulation = Simulation(
        Federation(
            clients=[clients[client] for client in clean],
            model=federation.model,
            recipe=recipe("fedavg"),
            plan=federation.plan,
            rounds=settings.rounds,
            clients_per_round=min(federation.clients_per_round, len(clean)),
            seed=federation.seed,
            evaluate_every=0,
            diagnostics="off",
            engine=federation.engine,
            workers=federation.workers,
            initial=model,
        )
    )
    for _ in simulation.rounds():
        pass
    return simulation.model


# ---- labels --------------------------------------------------------------------------------------


def _ordered(clients: Sequence[ClientData]) -> list[ClientData]:
    """Return the clients in the order of their names, which is that of all their numbers."""
    return sorted(clients, key=attrgetter("name"))


def _with_labels(clients: Sequence[ClientData], findings: Findings) -> list[ClientData]:
    return [
        replace(client, train_y=labels)
        for client, labels in zip(clients, findings.labels, strict=True)
    ]


def _wrong(clients: Sequence[ClientData], labels: Sequence[NDArray[np.int64]]) -> tuple[float, ...]:
    """Return the shares of wrong labels; nothing if the right ones are not known."""
    truth = [client.true_y for client in clients if client.true_y is not None]
    return wrong_shares(labels, truth) if len(truth) == len(clients) else ()
