"""Modules that users name on the command line, whatever these do while they are imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fairfleet.client.device.conditions import condition
from fairfleet.client.task import Task, load_task
from fairfleet.common.cli.user_modules import import_user_module

A_CONDITION = "def quiet():\n    return True\n"


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current directory; the directory and the search path are restored."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_module_in_the_current_directory_is_imported_and_the_search_path_is_restored(
    work_dir: Path,
) -> None:
    (work_dir / "user_module_plain.py").write_text("value = 3\n")
    before = list(sys.path)
    assert import_user_module("user_module_plain").value == 3
    assert sys.path == before


def test_a_module_may_change_the_current_directory(work_dir: Path) -> None:
    (work_dir / "user_module_moves.py").write_text("import os; os.chdir('data')\n")
    before = list(sys.path)
    import_user_module("user_module_moves")
    assert Path.cwd() == work_dir / "data"
    assert sys.path == before


def test_a_module_may_replace_the_search_path(work_dir: Path) -> None:
    (work_dir / "user_module_path.py").write_text("import sys; sys.path[:] = sys.path[1:]\n")
    before = list(sys.path)
    import_user_module("user_module_path")
    assert sys.path == before


def test_tasks_and_conditions_may_change_the_current_directory(work_dir: Path) -> None:
    chdir = "import os; os.chdir('data')\n"
    (work_dir / "user_task_moves.py").write_text(
        f"{chdir}import numpy as np\n"
        "from fairfleet.client.softmax import SoftmaxTask\n"
        "rows = np.zeros((2, 3), np.float32), np.array([0, 1])\n"
        "def task():\n    return SoftmaxTask(rows, classes=2)\n"
    )
    assert isinstance(load_task("user_task_moves:task", {}), Task)
    (work_dir / "data" / "data").mkdir()
    (work_dir / "data" / "user_condition_moves.py").write_text(chdir + A_CONDITION)
    assert condition("user_condition_moves:quiet")() == ""
