"""A device without torch or scikit-learn can take part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fairfleet.client
from fairfleet.lab.digits import write_shards


def imported_by(code: str) -> set[str]:
    """Return the top-level packages that a new interpreter has loaded after running `code`."""
    names = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{names}"], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_tasks_without_torch_import_neither_torch_nor_scikit_learn(tmp_path: Path) -> None:
    write_shards(tmp_path)
    packages = imported_by(
        "import fairfleet.client.agent.agent, fairfleet.client.task, fairfleet.client.softmax\n"
        "from fairfleet.client.task import Job, load_task\n"
        "from fairfleet.common.training_plan import Plan\n"
        f"options = {{'shard': '3', 'data': {str(tmp_path)!r}}}\n"
        "task = load_task('fairfleet.lab.digits:softmax', options)\n"
        "trained = task.train(task.initial_model().named(), Job(Plan()))\n"
        "task.evaluate(trained.arrays)\n"
        "from fairfleet.common.privacy import SystemNoise, PrivacyTerms, protect_update\n"
        "received, model = task.initial_model(), task.initial_model()\n"
        "terms = PrivacyTerms(clip=1.0, noise_multiplier=1.0)\n"
        "protect_update(received, model, terms, SystemNoise())\n"
    )
    assert "numpy" in packages
    assert packages.isdisjoint({"torch", "sklearn", "scipy", "sqlalchemy", "dp_accounting"})


def test_the_client_package_loads_neither_torch_nor_grpc_before_a_name_is_used() -> None:
    assert imported_by("import fairfleet.client").isdisjoint({"torch", "grpc", "numpy"})
    packages = imported_by("from fairfleet.client import Abandoned, Job, SoftmaxTask, Task")
    assert "torch" not in packages


def test_every_public_name_of_the_client_package_can_be_imported() -> None:
    for name in fairfleet.client.__all__:
        assert getattr(fairfleet.client, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = fairfleet.client.Nothing


def test_the_torch_task_imports_torch_and_nothing_of_the_lab(tmp_path: Path) -> None:
    packages = imported_by("import fairfleet.client.torch")
    assert "torch" in packages
    assert packages.isdisjoint({"sklearn", "scipy", "sqlalchemy"})


def test_a_server_without_privacy_does_not_import_the_accountant() -> None:
    packages = imported_by("import fairfleet.server.app, fairfleet.server.privacy.budget")
    assert "sqlalchemy" in packages
    assert packages.isdisjoint({"torch", "sklearn", "scipy", "dp_accounting"})


@pytest.mark.slow
def test_the_simulation_loads_torch_only_when_a_name_that_needs_it_is_used() -> None:
    packages = imported_by("import fairfleet.lab.simulation\nfairfleet.lab.simulation.Attack")
    assert "torch" not in packages
    assert "torch" in imported_by("from fairfleet.lab.simulation import Simulation")
