"""Tests of `fairfleet partition`."""

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
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.partitioning.label_shares import LabelShares, picture
from tests.support.program import run_in_process


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return run_in_process("partition", *words)


def test_the_command_draws_the_labels_of_each_client(tmp_path: Path) -> None:
    """The picture has many colours, and the terminal shows bars and the number of samples."""
    ended = run(
        "digits", "dirichlet:0.3", "--clients", "8", "--picture", str(tmp_path / "labels.png")
    )
    assert ended.returncode == 0, ended.stderr
    assert "1,797 of 1,797" in ended.stdout
    assert ended.stdout.count("█") > 50
    with Image.open(tmp_path / "labels.png") as drawn:
        assert drawn.width > 1000
        assert len(drawn.convert("RGB").getcolors(1 << 20) or []) > 10


def test_json_has_every_count_and_nothing_else_is_printed() -> None:
    counts = json.loads(
        run("digits", "shards:2", "--clients", "10", "--seed", "3", "--json").stdout
    )
    assert (counts["dataset"], counts["partition"], counts["seed"], counts["clients"]) == (
        "digits",
        "shards:2",
        3,
        10,
    )
    assert np.array(counts["counts"]).shape == (10, 10)
    assert np.array(counts["counts"]).sum(1).tolist() == counts["sizes"]
    assert sum(counts["sizes"]) == counts["samples"] == 1797
    assert 0.5 < counts["skew"] < 1


def test_natural_users_need_no_number_of_clients() -> None:
    assert json.loads(run("digits-rotated", "user", "--json").stdout)["clients"] == 10


def test_the_clients_shown_are_the_clients_that_simulate_uses() -> None:
    """Every client has the same samples, for the default of all samples and for a part."""
    for part, samples in (("all", 1797), ("train", 1257)):
        chosen = ["--part", part] if part == "train" else []
        words = ["digits-rotated", "dirichlet:0.3", "--clients", "7", "--seed", "5"]
        shown = json.loads(run(*words, *chosen, "--json").stdout)
        assert (shown["part"], shown["samples"]) == (part, samples)
        fields = {
            "data": "digits-rotated",
            "partition": "dirichlet:0.3",
            "clients": 7,
            "seed": 5,
            "split": (0.8, 0.2),
        }
        if part == "train":
            fields |= {"part": part}
        clients = build_federation(Experiment.model_validate(fields), None).clients
        labels = [np.concatenate([client.train_y, client.test_y]) for client in clients]
        assert [np.bincount(own, minlength=10).tolist() for own in labels] == shown["counts"]


def test_the_title_names_the_samples_that_are_divided() -> None:
    assert (
        "digits-rotated, all samples, iid" in run("digits-rotated", "iid", "--clients", "3").stdout
    )
    words = ["digits-rotated", "iid", "--clients", "3", "--part", "train"]
    assert "digits-rotated, training part, iid" in run(*words).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cifar10", "iid", "--clients", "5", "--data-dir", "/nowhere"], "How to get it"),
        (["synthetic", "diriclet:1", "--clients", "5"], "There are iid, shards"),
        (["synthetic", "iid"], "number of clients"),
        (["digits", "user"], "no natural users"),
        (["digits", "pat:3", "--clients", "2"], "use 4 clients or more"),
        (["digits", "shards:inf", "--clients", "2"], "needs a whole number from 1"),
        (["[/b]", "iid", "--clients", "2"], "[/b]"),
        (["synthetic", "iid", "--clients", "5", "--picture", "x.gif"], ".png, .svg, .pdf"),
        (
            ["synthetic", "iid", "--clients", "5", "--picture", "/nowhere/x.png"],
            "cannot write the picture",
        ),
    ],
)
@pytest.mark.usefixtures("no_data")
def test_a_mistake_is_explained_and_exits_with_code_2(words: list[str], message: str) -> None:
    ended = run(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr


def test_the_command_starts_without_torch() -> None:
    code = "import sys, fairfleet.lab.cli.partition as _; "
    code += "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_skew_is_0_for_equal_mixes_and_grows_with_difference() -> None:
    names = tuple("ab")
    assert LabelShares(np.array([[2, 2], [5, 5]]), names).skew == 0
    assert LabelShares(np.array([[4, 0], [0, 4]]), names).skew == 0.5


@pytest.mark.parametrize("shape", [(400, 10), (10, 62)])
def test_many_clients_or_classes_are_drawn_as_an_image(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    counts = np.random.default_rng(0).integers(1, 9, shape)
    picture(LabelShares(counts, tuple(map(str, range(shape[1])))), "many", tmp_path / "many.svg")
    assert any(
        node.tag.endswith("image") for node in ElementTree.parse(tmp_path / "many.svg").iter()
    )


def test_names_with_dollar_signs_are_drawn_unchanged(tmp_path: Path) -> None:
    """A dollar sign does not start a formula."""
    picture(
        LabelShares(np.ones((3, 2), int), (r"$\frac$", "a$b$")), r"$\sqrt", tmp_path / "labels.png"
    )
    assert (tmp_path / "labels.png").stat().st_size


def test_a_picture_without_a_supported_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        picture(LabelShares(np.ones((2, 2), np.int64), tuple("ab")), "", tmp_path / "labels")
