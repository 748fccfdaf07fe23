from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from fairfleet.common.errors import UsageError
from fairfleet.lab.label_shares import LabelShares, picture
from tests.e2e.fleet import PROGRAM


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, "partition", *words], capture_output=True, text=True, check=False)


def test_the_program_draws_who_holds_which_labels(tmp_path: Path) -> None:
    """The picture shows as many columns as there are clients, in more than one colour, and the text says the rest."""
    ended = run("digits", "dirichlet:0.3", "--clients", "8", "--picture", str(tmp_path / "labels.png"))
    assert ended.returncode == 0, ended.stderr
    assert "1,797 of 1,797" in ended.stdout
    assert ended.stdout.count("█") > 50
    with Image.open(tmp_path / "labels.png") as drawn:
        assert drawn.width > 1000
        assert len(drawn.convert("RGB").getcolors(1 << 20) or []) > 10


def test_json_has_every_count_and_nothing_else_is_printed() -> None:
    found = json.loads(run("digits", "shards:2", "--clients", "10", "--seed", "3", "--json").stdout)
    assert (found["dataset"], found["partition"], found["seed"], found["clients"]) == ("digits", "shards:2", 3, 10)
    assert np.array(found["counts"]).shape == (10, 10)
    assert np.array(found["counts"]).sum(1).tolist() == found["sizes"]
    assert sum(found["sizes"]) == found["samples"] == 1797
    assert 0.5 < found["skew"] < 1


def test_natural_users_need_no_number_of_clients() -> None:
    assert json.loads(run("digits-rotated", "user", "--pool", "all", "--json").stdout)["samples"] == 1797
    assert json.loads(run("digits-rotated", "user", "--json").stdout)["samples"] == 1257


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cifar10", "iid", "--clients", "5", "--data-dir", "/nowhere"], "How to get it"),
        (["synthetic", "diriclet:1", "--clients", "5"], "There are iid, shards"),
        (["synthetic", "iid"], "number of clients"),
        (["digits", "user"], "no natural users"),
        (["synthetic", "iid", "--clients", "5", "--picture", "x.gif"], ".png, .svg, .pdf"),
        (["synthetic", "iid", "--clients", "5", "--picture", "/nowhere/x.png"], "cannot write the picture"),
    ],
)
def test_a_mistake_is_explained_and_ends_with_2(words: list[str], says: str) -> None:
    ended = run(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys, fairfleet.lab.partition_commands; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_skew_is_0_for_equal_mixes_and_grows_with_difference() -> None:
    names = tuple("ab")
    assert LabelShares(np.array([[2, 2], [5, 5]]), names).skew == 0
    assert LabelShares(np.array([[4, 0], [0, 4]]), names).skew == 0.5


@pytest.mark.parametrize("shape", [(400, 10), (10, 62)])
def test_very_many_clients_or_classes_are_drawn_as_an_image(shape: tuple[int, int], tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, shape)
    picture(LabelShares(counts, tuple(map(str, range(shape[1])))), "many", tmp_path / "many.svg")
    assert any(node.tag.endswith("image") for node in ElementTree.parse(tmp_path / "many.svg").iter())


def test_a_picture_has_a_known_format(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        picture(LabelShares(np.ones((2, 2), np.int64), tuple("ab")), "", tmp_path / "labels")
