"""Privacy settings, and releases that a budget counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.privacy import PrivacyTerms, ReportTerms
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.rules import recipe
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.published_model import PublishedModel

CLIENT: dict[str, Any] = {"where": "client", "clip": 1.0, "noise_multiplier": 2.0}


SERVER: dict[str, Any] = {"where": "server", "clip": 1.0, "noise_multiplier": 2.0}


UNIFORM = recipe("fedavg", weighting="uniform")


REPORT = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=0.1)


APPLIED = PrivacyTerms(clip=1.0, noise_multiplier=2.0)


NOISED = PrivacyTerms(
    clip=1.0,
    noise_multiplier=2.0,
    reports=ReportTerms(noise_multiplier=2.0, loss_bound=5.0, gradient_bound=5.0),
)


def announce(
    budget: PrivacyBudget,
    client: str,
    number: int,
    digest: bytes,
    applied: PrivacyTerms = APPLIED,
    report: TrainReport = REPORT,
) -> None:
    """Announce an update with the privacy that was applied to it."""
    budget.update_announced(client, number, digest, applied, report)


def new_store(folder: Path) -> Store:
    """Return a store with a federation."""
    store, model = Store(folder), Model.of({"weight": np.zeros(3, np.float32)})
    if not store.has_federation:
        store.create("test", model, PublishedModel.of(0, model).digest)
    return store
