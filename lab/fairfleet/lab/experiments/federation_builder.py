"""Build the federation that an experiment describes: data, model, rule and plan.

The model is checked against the data before any training begins, so that a mismatch is reported
at once and with a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fairfleet.client.training.torch_measures import NamedMeasures
from fairfleet.common.cli.user_modules import import_user_module
from fairfleet.common.errors import UsageError
from fairfleet.common.training_plan import Plan
from fairfleet.lab import models
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.datasets.preprocessing import preprocessing
from fairfleet.lab.datasets.registry import state_of_own
from fairfleet.lab.experiments.client_datasets import (
    client_datasets,
    load_cached,
    select_samples,
)
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.simulation.federation import Engine, Federation


def build_federation(
    experiment: Experiment, data_dir: Path | None, engine: Engine = "auto", workers: int = 0
) -> Federation:
    """Return the federation to simulate. Raise UsageError if its model cannot process its data."""
    loaded = load_cached(experiment.data, data_dir, state_of_own(experiment.data))
    dataset = select_samples(experiment, loaded)
    # Means and deviations are measured on the loaded dataset, not on the selected samples.
    clients = client_datasets(experiment, dataset, preprocessing(experiment.preprocessing, loaded))
    check_model_input(experiment, _extreme_samples(clients), dataset.classes)
    return _federation(experiment, clients, dataset.classes, engine, workers)


def _federation(
    experiment: Experiment,
    clients: Sequence[ClientData],
    classes: int,
    engine: Engine,
    workers: int,
) -> Federation:
    shape, seed = clients[0].train_x.shape[1:], experiment.seed
    return Federation(
        clients=clients,
        model=partial(models.model, experiment.model, shape, classes, seed),
        recipe=experiment.recipe(),
        plan=_complete_plan(experiment),
        rounds=experiment.rounds,
        clients_per_round=experiment.clients_per_round,
        selection=experiment.selection,
        seed=seed,
        evaluate_every=experiment.evaluate_every,
        verification=experiment.verification.terms() if experiment.verification else None,
        behaviour=experiment.behaviour,
        admission=experiment.admission,
        diagnostics=experiment.diagnostics,
        codec=experiment.codec,
        error_feedback=experiment.error_feedback,
        prediction=experiment.prediction and experiment.privacy is None,
        loss=experiment.loss,
        loss_total=experiment.loss_total,
        judged=experiment.judged,
        privacy=experiment.privacy,
        measure=experiment.measure,
        measures=_measures(experiment.measures),
        engine=engine,
        workers=workers,
    )


def _measures(spec: str) -> NamedMeasures | None:
    """Return the function that `module:function` names; None for an empty text."""
    if not spec:
        return None
    module_name, _, name = spec.partition(":")
    try:
        function = getattr(import_user_module(module_name), name, None)
    except (ModuleNotFoundError, ValueError) as error:
        raise UsageError(f"measures {spec!r}: {error}; give module:function") from error
    if not callable(function):
        raise UsageError(f"measures {spec!r}: module {module_name} has no function {name!r}")
    measures: NamedMeasures = function
    return measures


def _complete_plan(experiment: Experiment) -> Plan:
    """Return the plan with the seed and the decay of the experiment, unless it has its own."""
    plan, updates = experiment.plan, dict[str, float]()
    if not plan.seed:
        updates["seed"] = experiment.seed
    if experiment.learning_rate_decay != 1.0:
        updates["learning_rate_decay"] = experiment.learning_rate_decay
    return plan.model_copy(update=updates)


def check_model_input(experiment: Experiment, samples: np.ndarray, classes: int) -> None:
    """Raise UsageError if the model cannot process these preprocessed samples."""
    model = models.model(experiment.model, samples.shape[1:], classes, experiment.seed).eval()
    try:
        with torch.inference_mode():
            model(torch.from_numpy(np.ascontiguousarray(samples)))
    except (RuntimeError, IndexError, ValueError) as error:
        raise UsageError(
            f"the model {experiment.model} cannot process the samples of {experiment.data}: "
            f"preprocessing {experiment.preprocessing!r} makes them {samples.dtype} of shape "
            f"{samples.shape[1:]} ({error}). Use --set preprocessing=plain for tokens and "
            "preprocessing=unit for images and numbers, or choose another model"
        ) from None


def _extreme_samples(clients: Sequence[ClientData]) -> np.ndarray:
    """Return two samples such that a model that accepts them accepts all samples.

    For tokens these are filled with the lowest and the highest token of all clients.
    """
    first = clients[0].train_x[:2]
    if first.dtype.kind not in "iu":
        return first
    arrays = [array for client in clients for array in (client.train_x, client.test_x)]
    tokens = [array for array in arrays if array.size]
    ends = (min(int(array.min()) for array in tokens), max(int(array.max()) for array in tokens))
    return np.stack([np.full(first.shape[1:], end, first.dtype) for end in ends])
