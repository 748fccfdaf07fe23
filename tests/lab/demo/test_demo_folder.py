"""The folder of a demo: replaced if a demo made it, otherwise not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairfleet.common.errors import UsageError
from fairfleet.lab.demo.command import DemoTask, claimed, demo
from tests.support.flock_holder import flock_held


def test_the_files_of_an_earlier_demo_are_removed(tmp_path: Path) -> None:
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
def test_a_folder_that_no_demo_made_is_not_touched(tmp_path: Path, kind: str) -> None:
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
    with (
        claimed(tmp_path / "demo"),
        pytest.raises(UsageError, match="another demo"),
        claimed(tmp_path / "demo"),
    ):
        pass


def test_a_folder_that_an_older_version_uses_is_refused_until_it_dies(tmp_path: Path) -> None:
    with (
        flock_held(tmp_path / ".fairfleet-demo"),
        pytest.raises(UsageError, match="another demo"),
        claimed(tmp_path),
    ):
        pass
    with claimed(tmp_path):
        pass


def test_the_torch_task_says_how_to_install_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairfleet.common.extras.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'fairfleet\[torch\]'"):
        demo(task=DemoTask.TORCH_MLP, folder=tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
