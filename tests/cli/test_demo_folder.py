from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fairfleet.common.errors import UsageError
from fairfleet.lab.demo import DemoTask, claimed, demo


def test_what_an_earlier_demo_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with claimed(folder):
        (folder / "fedavg" / "logs").mkdir(parents=True)
        (folder / "model.safetensors").touch()
    with claimed(folder):
        assert [path.name for path in folder.iterdir()] == [".fairfleet-demo"]


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    with claimed(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".fairfleet-demo"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_ours_is_not_touched(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("all of it")
    with (
        pytest.raises(UsageError, match="was not made by `fairfleet demo`"),
        claimed(tmp_path if kind == "folder" else precious),
    ):
        pass
    assert precious.read_text() == "all of it"
    assert list(tmp_path.iterdir()) == [precious]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with claimed(tmp_path / "demo"), pytest.raises(UsageError, match="another demo"), claimed(tmp_path / "demo"):
        pass


def test_the_torch_task_says_how_to_install_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'fairfleet\[torch\]'"):
        demo(task=DemoTask.TORCH_MLP, folder=tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
