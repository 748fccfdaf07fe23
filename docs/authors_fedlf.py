"""Run the code of FedLF's authors on the data and settings of `fairfleet reproduce fedlf-table1`.

    git clone https://github.com/zibinpan/FedLF ../FedLF && pip install cvxopt
    python docs/authors_fedlf.py ../FedLF --rule FedFV --setting Pat-2 --seed 1

Where our figures differ from the published ones, this shows which of them the authors' program
gives. Its files are not changed. Only torchvision, with which it reads Fashion-MNIST, is replaced
by our reader. The released FedMDFG and FedLF stop with an error before the first round. Calls that
do not fit the called functions are corrected, which does not change the results; these runs are
labelled 'mended'. A run takes 10 to 60 minutes on one core, and appends a line to
results/fedlf-table1-authors.jsonl, which docs/explanation/results.md shows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from fairfleet.common.errors import UsageError
from fairfleet.common.fairness import Fairness
from fairfleet.lab import datasets
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Point, Run
from fairfleet.lab.experiments.sweep import merged
from fairfleet.lab.reproductions.authors import authors_label, authors_ledger
from fairfleet.lab.reproductions.fedlf_table1 import BASE, TABLE_1

HOME = Path(__file__).parents[1]
ALGORITHMS = {
    "FedAvg": "FedAvg",
    "FedFV": "FedFV",
    "FedMGDA+": "FedMGDA_plus",
    "FedMDFG": "FedMDFG",
    "FedLF": "FedLF",
}
SETTINGS = {
    "Pat-2": ("DataLoader_fashion_pat", 2),
    "Pat-1": ("DataLoader_fashion_pat", 1),
    "Dir(0.1)": ("DataLoader_fashion_dir", 0),
}
EVERY = BASE["evaluate_every"]


class FashionMNIST:
    """The part of torchvision's class that the authors' code uses."""

    def __init__(
        self, root: str, train: bool, download: bool, transform: Callable[[Any], Any]
    ) -> None:
        dataset = datasets.load("fashion-mnist")
        part = slice(dataset.train_size) if train else slice(dataset.train_size, None)
        self.data, self.targets = torch.tensor(dataset.x[part]), torch.tensor(dataset.y[part])
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.data[index]), int(self.targets[index])


class ToTensor:
    """torchvision's conversion of an image to a tensor of values from 0 to 1."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.float().div(255)[None]


class Compose:
    """torchvision's chain of transforms."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


def stand_in_for_torchvision() -> None:
    """Make `import torchvision` give the classes of this module."""
    module = ModuleType("torchvision")
    module.transforms = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
    module.transforms.__dict__.update(ToTensor=ToTensor, Compose=Compose)
    module.datasets = SimpleNamespace(FashionMNIST=FashionMNIST)  # type: ignore[attr-defined]
    sys.modules.update({"torchvision": module, "torchvision.transforms": module.transforms})


def mend_fedmdfg(gfedplat: Any) -> None:
    """Correct a missing import, the call of a solver, and two unused results."""
    utils, caller = gfedplat.algorithm.common.utils, gfedplat.algorithm.FedMDFG.FedMDFG
    solve, direction = utils.setup_qp_and_solve, utils.get_fedmdfg_d

    def solve_in_numpy(rows: Any) -> tuple[Any, int]:
        solution, optimal = solve(torch.from_numpy(rows), torch.device("cpu"))
        return solution.numpy(), optimal

    def direction_and_flags(*words: Any) -> tuple[Any, ...]:
        solution, rows, guided, _ = direction(*words)
        return solution, rows, guided, None, None

    utils.random, utils.setup_qp_and_solve = random, solve_in_numpy
    caller.get_fedmdfg_d = direction_and_flags


def mend_fedlf(gfedplat: Any) -> None:
    """Correct a name: the other files call it metric_list, this one client_test."""
    theirs = gfedplat.FedLF
    gfedplat.FedLF = lambda *, metric_list, **others: theirs(client_test=metric_list, **others)


MENDS: dict[str, Callable[[Any], None]] = {"FedMDFG": mend_fedmdfg, "FedLF": mend_fedlf}
MISSING = {"theta": 11.25, "s": 5}  # FedMDFG's own defaults for settings that have no flag


def run_theirs(
    checkout: Path, arguments: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Return the results of their program for each client."""
    if not (checkout / "gfedplat" / "main.py").exists():
        raise UsageError(
            f"{checkout} is no checkout of zibinpan/FedLF: there is no gfedplat/main.py in it"
        )
    stand_in_for_torchvision()
    sys.path.insert(0, str(checkout))
    loader, classes = SETTINGS[arguments.setting]
    sys.argv = (
        f"run.py --seed {arguments.seed} --device -1 --module MLP "
        f"--algorithm {ALGORITHMS[arguments.rule]} "
        f"--dataloader {loader} --N 100 --NC {classes} --Diralpha 0.1 --B 50 --C 0.1 "
        f"--R {BASE['rounds']} --E 1 "
        f"--lr {arguments.rate} --decay 0.999 --test_interval {EVERY}"
    ).split()
    with (
        contextlib.redirect_stdout(io.StringIO()),  # they print a lot
        tempfile.TemporaryDirectory() as logs,
        Progress(console=console, transient=True) as bars,
    ):
        import gfedplat

        if arguments.rule in MENDS:
            MENDS[arguments.rule](gfedplat)
        _, algorithm = gfedplat.initialize(gfedplat.read_params() | MISSING)
        bar = bars.add_task(
            f"{arguments.setting} {arguments.rule} seed {arguments.seed}", total=BASE["rounds"]
        )
        algorithm.save_folder = f"{logs}/"
        algorithm.outFunc = lambda running: bars.update(bar, completed=running.current_comm_round)
        algorithm.run()
    return list(algorithm.comm_log["client_metric_history"])


def label_of(arguments: argparse.Namespace) -> str:
    """Return the label of a run in tables."""
    readings = {
        "mended": arguments.rule in MENDS,
        f"rate {arguments.rate:g}": arguments.rate != BASE["plan"]["learning_rate"],
    }
    return authors_label(arguments.rule, *(reading for reading, holds in readings.items() if holds))


def key_of(arguments: argparse.Namespace) -> str:
    """Return the key of a run in the file of results."""
    return f"{arguments.setting} / {label_of(arguments)} / {arguments.seed}"


def as_run(
    clients: list[dict[str, Any]], arguments: argparse.Namespace, made_by: str, seconds: float
) -> Run:
    """Return the results as the record of an equivalent experiment of ours."""
    rule = next(rule for rule in TABLE_1.sweep.rules if rule.label == arguments.rule)
    setting = next(
        setting for setting in TABLE_1.sweep.settings if setting.label == arguments.setting
    )
    values = merged(
        BASE,
        setting.changes,
        rule.changes,
        {"seed": arguments.seed, "plan": {"learning_rate": arguments.rate}},
    )
    tested = np.array([client["test_accuracy"] for client in clients]).T / 100  # one line per test
    return Run(
        key=key_of(arguments),
        label=label_of(arguments),
        setting=arguments.setting,
        experiment=Experiment.model_validate(values),
        complete=True,
        rounds=BASE["rounds"],
        seconds=seconds,
        training_seconds=0.0,
        accuracy=tuple(np.round(tested[-1], 5).tolist()),
        tested=tuple(client["local_test_number"] for client in clients),
        points=tuple(point(EVERY * index, line) for index, line in enumerate(tested) if index),
        made_by=made_by,
        unix_seconds=time.time(),
    )


def point(round_number: int, accuracy: Any) -> Point:
    """Return the accuracies of the clients after a round as a point of a run."""
    fairness = Fairness.of(accuracy.tolist())
    return Point(
        round=round_number,
        mean=round(fairness.mean, 5),
        deviation=round(fairness.standard_deviation, 5),
        worst_5=round(fairness.worst_5, 5),
        best_5=round(fairness.best_5, 5),
        loss=None,
        improved=None,
        conflicts=None,
        layer_conflicts=None,
    )


def main() -> None:
    """Run the authors' code once and record the result."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="of https://github.com/zibinpan/FedLF")
    parser.add_argument("--rule", choices=ALGORITHMS, required=True)
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=BASE["plan"]["learning_rate"])
    parser.add_argument("--results", type=Path, default=HOME / "results")
    arguments = parser.parse_args()
    console, ledger = Console(stderr=True), authors_ledger(TABLE_1.name, arguments.results)
    if key_of(arguments) in ledger.runs():
        sys.exit(f"{key_of(arguments)} is in {ledger.path}; it is not run again")
    checkout = arguments.checkout.resolve()
    # The matrices are small, so more threads are slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    began = time.monotonic()
    try:
        client_results = run_theirs(checkout, arguments, console)
    except ModuleNotFoundError as error:
        sys.exit(f"the authors' code needs {error.name}: pip install {error.name}")
    except UsageError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the authors' code cannot continue a run")
    git = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    record = as_run(
        client_results,
        arguments,
        f"zibinpan/FedLF {git.stdout.strip()}".strip(),
        time.monotonic() - began,
    )
    ledger.add(record)
    fair = record.fairness
    console.print(
        f"{record.key}: acc {fair.mean:.3f}, fair {fair.angle_radians:.3f}, "
        f"worst 5 % {fair.worst_5:.3f}, best 5 % {fair.best_5:.3f}"
    )


if __name__ == "__main__":
    main()
