"""A device without torch or scikit-learn takes part all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fairfleet.lab.digits import write_shards


def imported_by(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has after running `code`."""
    names = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{names}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_tasks_without_torch_import_neither_torch_nor_scikit_learn(tmp_path: Path) -> None:
    write_shards(tmp_path)
    found = imported_by(
        "import fairfleet.client.agent, fairfleet.client.task, fairfleet.client.softmax\n"
        "from fairfleet.client.task import Job, load_task\n"
        "from fairfleet.common.plan import Plan\n"
        f"task = load_task('fairfleet.lab.digits:softmax', {{'shard': '3', 'data': {str(tmp_path)!r}}})\n"
        "trained = task.train(task.initial_model().named(), Job(Plan()))\n"
        "task.evaluate(trained.arrays)\n"
        "from fairfleet.common.privacy import SystemNoise, Terms, protect_update\n"
        "received, model = task.initial_model(), task.initial_model()\n"
        "protect_update(received, model, Terms(clip=1.0, noise_multiplier=1.0), SystemNoise())\n"
    )
    assert "numpy" in found
    assert found.isdisjoint({"torch", "sklearn", "scipy", "sqlalchemy", "dp_accounting"})


def test_the_torch_task_imports_torch_and_nothing_of_the_lab(tmp_path: Path) -> None:
    found = imported_by("import fairfleet.client.torch")
    assert "torch" in found
    assert found.isdisjoint({"sklearn", "scipy", "sqlalchemy"})


def test_a_server_without_privacy_does_not_import_the_accountant() -> None:
    found = imported_by("import fairfleet.server.serve, fairfleet.server.spending")
    assert "sqlalchemy" in found
    assert found.isdisjoint({"torch", "sklearn", "scipy", "dp_accounting"})
