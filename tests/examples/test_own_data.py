"""The example of an own dataset and partition, in a federation and in the lab."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.errors import UsageError
from tests.examples.support import (
    EXAMPLES,
    REAL,
    accuracies,
    check_trained,
    copied,
    module_of,
    needs_real_data,
    run_python,
)
from tests.support.program import run_in_process


def test_every_sample_has_one_client_and_most_are_of_its_favourite_classes() -> None:
    prepare = module_of(EXAMPLES / "own-data" / "prepare.py")
    labels = np.random.default_rng(1).integers(0, 10, 2000)
    parts = prepare.divide(labels, clients=5)
    assert sorted(np.concatenate(parts)) == list(range(2000))
    for client, indices in enumerate(parts):
        counts = np.bincount(labels[indices], minlength=10)
        favourites = counts[[2 * client, 2 * client + 1]].sum()
        assert favourites > 0.7 * counts.sum()
    again = prepare.divide(labels, clients=5)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_more_clients_than_pairs_of_classes_have_samples_too() -> None:
    prepare = module_of(EXAMPLES / "own-data" / "prepare.py")
    parts = prepare.divide(np.random.default_rng(1).integers(0, 10, 500), clients=12)
    assert len(parts) == 12
    assert min(map(len, parts)) > 10


def test_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    task = module_of(EXAMPLES / "own-data" / "task.py").task
    with pytest.raises(UsageError, match=r"client-3\.npz; write the data .* `python prepare\.py"):
        task(client="3", data_dir=str(tmp_path))


def test_the_files_are_the_clients_of_the_lab(tmp_path: Path) -> None:
    example = copied("own-data", tmp_path)
    run_python(example, "prepare.py", "--clients", "4")
    sizes = []
    for client in range(4):
        with np.load(example / "data" / f"client-{client}.npz") as file:
            sizes.append(len(file["y"]))
    shown = run_in_process("partition", "data/all.npz", "user", "--json", folder=example)
    assert shown.returncode == 0, shown.stderr
    assert sum(sizes) == 1797
    assert all(str(size) in shown.stdout for size in sizes)


@pytest.mark.slow
def test_it_trains_in_a_federation_of_real_processes(tmp_path: Path) -> None:
    example = copied("own-data", tmp_path)
    run_python(example, "prepare.py")
    done = run_python(example, "run.py", "--clients", "5")
    check_trained(example)
    assert len(accuracies(done.stdout)) == 5
    assert min(accuracies(done.stdout).values()) > 75


@pytest.mark.slow
@pytest.mark.torch
def test_the_lab_simulates_the_same_clients(tmp_path: Path) -> None:
    example = copied("own-data", tmp_path)
    run_python(example, "prepare.py")
    words = ("simulate", "--data", "data/all.npz", "--partition", "user", "--rule", "fedlf")
    run_python(example, "-m", "fairfleet.common.cli", *words, "--rounds", "3")


@pytest.mark.slow
@needs_real_data
def test_it_trains_on_fashion_mnist(tmp_path: Path) -> None:
    example = copied("own-data", tmp_path)
    run_python(example, "prepare.py", "--clients", "3", "--data-dir", REAL)
    done = run_python(example, "run.py", "--clients", "3", "--rounds", "2")
    check_trained(example)
    assert min(accuracies(done.stdout).values()) > 40  # after so few rounds; chance is 10
