"""Runs FedLF's authors' own code, as it is, on the data and setups of `fairfleet reproduce fedlf-table1`.

    git clone https://github.com/zibinpan/FedLF ../FedLF && pip install cvxopt
    python docs/authors_fedlf.py ../FedLF --rule FedFV --setting Pat-2 --seed 1

Where our figures differ from the published ones, it tells whether the authors' program has theirs or ours. Its files
stay as they are; only torchvision, by which it reads Fashion-MNIST, is stood in for by our own reader. The released
FedMDFG and FedLF stop with an error before the first round: calls that do not fit their callees are made to fit, which
changes nothing of what is computed, and these runs are labelled 'mended'. A run takes 10 to 60 minutes of one core and
ends as a line of results/fedlf-table1-authors.jsonl, which docs/results.md shows.
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
from fairfleet.lab.experiment import Experiment
from fairfleet.lab.records import Point, Run
from fairfleet.lab.reproductions.authors import authors_label, authors_ledger
from fairfleet.lab.reproductions.fedlf_table1 import BASE, TABLE_1
from fairfleet.lab.sweep import merged

HOME = Path(__file__).parents[1]
ALGORITHMS = {"FedAvg": "FedAvg", "FedFV": "FedFV", "FedMGDA+": "FedMGDA_plus", "FedMDFG": "FedMDFG", "FedLF": "FedLF"}
SETTINGS = {
    "Pat-2": ("DataLoader_fashion_pat", 2),
    "Pat-1": ("DataLoader_fashion_pat", 1),
    "Dir(0.1)": ("DataLoader_fashion_dir", 0),
}
EVERY = BASE["evaluate_every"]


class FashionMNIST:
    """What the authors' code asks of torchvision's."""

    def __init__(self, root: str, train: bool, download: bool, transform: Callable[[Any], Any]) -> None:
        whole = datasets.load("fashion-mnist")
        part = slice(whole.train_size) if train else slice(whole.train_size, None)
        self.data, self.targets = torch.tensor(whole.x[part]), torch.tensor(whole.y[part])
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        return self.transform(self.data[at]), int(self.targets[at])


class ToTensor:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.float().div(255)[None]


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


def stand_in_for_torchvision() -> None:
    module = ModuleType("torchvision")
    module.transforms = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
    module.transforms.__dict__.update(ToTensor=ToTensor, Compose=Compose)
    module.datasets = SimpleNamespace(FashionMNIST=FashionMNIST)  # type: ignore[attr-defined]
    sys.modules.update({"torchvision": module, "torchvision.transforms": module.transforms})


def mend_fedmdfg(gfedplat: Any) -> None:
    """A forgotten import, a solver that is called in another way than it is written, two results that are not used."""
    utils, caller = gfedplat.algorithm.common.utils, gfedplat.algorithm.FedMDFG.FedMDFG
    solve, direction = utils.setup_qp_and_solve, utils.get_fedmdfg_d

    def solve_in_numpy(rows: Any) -> tuple[Any, int]:
        found, optimal = solve(torch.from_numpy(rows), torch.device("cpu"))
        return found.numpy(), optimal

    def direction_and_flags(*words: Any) -> tuple[Any, ...]:
        found, rows, guided, _ = direction(*words)
        return found, rows, guided, None, None

    utils.random, utils.setup_qp_and_solve = random, solve_in_numpy
    caller.get_fedmdfg_d = direction_and_flags


def mend_fedlf(gfedplat: Any) -> None:
    """What is called metric_list everywhere else is called client_test here."""
    theirs = gfedplat.FedLF
    gfedplat.FedLF = lambda *, metric_list, **others: theirs(client_test=metric_list, **others)


MENDS: dict[str, Callable[[Any], None]] = {"FedMDFG": mend_fedmdfg, "FedLF": mend_fedlf}
MISSING = {"theta": 11.25, "s": 5}  # FedMDFG asks for them and no flag gives them: its own defaults


def run_theirs(checkout: Path, asked: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """What their program found out about each client."""
    if not (checkout / "gfedplat" / "main.py").exists():
        raise UsageError(f"{checkout} is no checkout of zibinpan/FedLF: there is no gfedplat/main.py in it")
    stand_in_for_torchvision()
    sys.path.insert(0, str(checkout))
    loader, classes = SETTINGS[asked.setting]
    sys.argv = (
        f"run.py --seed {asked.seed} --device -1 --module MLP --algorithm {ALGORITHMS[asked.rule]} "
        f"--dataloader {loader} --N 100 --NC {classes} --Diralpha 0.1 --B 50 --C 0.1 --R {BASE['rounds']} --E 1 "
        f"--lr {asked.rate} --decay 0.999 --test_interval {EVERY}"
    ).split()
    with (
        contextlib.redirect_stdout(io.StringIO()),  # they print a lot
        tempfile.TemporaryDirectory() as logs,
        Progress(console=console, transient=True) as bars,
    ):
        import gfedplat

        if asked.rule in MENDS:
            MENDS[asked.rule](gfedplat)
        _, algorithm = gfedplat.initialize(gfedplat.read_params() | MISSING)
        bar = bars.add_task(f"{asked.setting} {asked.rule} seed {asked.seed}", total=BASE["rounds"])
        algorithm.save_folder = f"{logs}/"
        algorithm.outFunc = lambda one: bars.update(bar, completed=one.current_comm_round)
        algorithm.run()
    return list(algorithm.comm_log["client_metric_history"])


def label_of(asked: argparse.Namespace) -> str:
    readings = {
        "mended": asked.rule in MENDS,
        f"rate {asked.rate:g}": asked.rate != BASE["plan"]["learning_rate"],
    }
    return authors_label(asked.rule, *(reading for reading, holds in readings.items() if holds))


def key_of(asked: argparse.Namespace) -> str:
    return f"{asked.setting} / {label_of(asked)} / {asked.seed}"


def as_run(clients: list[dict[str, Any]], asked: argparse.Namespace, made_by: str, seconds: float) -> Run:
    """As a run of ours, with the experiment that is our reading of it."""
    rule = next(one for one in TABLE_1.sweep.rules if one.label == asked.rule)
    setting = next(one for one in TABLE_1.sweep.settings if one.label == asked.setting)
    values = merged(BASE, setting.changes, rule.changes, {"seed": asked.seed, "plan": {"learning_rate": asked.rate}})
    tested = np.array([client["test_accuracy"] for client in clients]).T / 100  # one line per test
    return Run(
        key=key_of(asked),
        label=label_of(asked),
        setting=asked.setting,
        experiment=Experiment.model_validate(values),
        complete=True,
        rounds=BASE["rounds"],
        seconds=seconds,
        training_seconds=0.0,
        accuracy=tuple(np.round(tested[-1], 5).tolist()),
        tested=tuple(client["local_test_number"] for client in clients),
        points=tuple(point(EVERY * at, line) for at, line in enumerate(tested) if at),
        made_by=made_by,
        unix_seconds=time.time(),
    )


def point(round_: int, accuracy: Any) -> Point:
    found = Fairness.of(accuracy.tolist())
    return Point(
        round=round_,
        mean=round(found.mean, 5),
        deviation=round(found.standard_deviation, 5),
        worst_5=round(found.worst_5, 5),
        best_5=round(found.best_5, 5),
        loss=None,
        improved=None,
        conflicts=None,
        layer_conflicts=None,
    )


def main() -> None:
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
    asked = parser.parse_args()
    console, ledger = Console(stderr=True), authors_ledger(TABLE_1.name, asked.results)
    if key_of(asked) in ledger.runs():
        sys.exit(f"{key_of(asked)} is in {ledger.path}; it is not run again")
    checkout = asked.checkout.resolve()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # small matrices: more threads are slower
    began = time.monotonic()
    try:
        found = run_theirs(checkout, asked, console)
    except ModuleNotFoundError as error:
        sys.exit(f"the authors' code needs {error.name}: pip install {error.name}")
    except UsageError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the authors' code cannot go on from where it was")
    git = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    made = as_run(found, asked, f"zibinpan/FedLF {git.stdout.strip()}".strip(), time.monotonic() - began)
    ledger.add(made)
    fair = made.fairness
    console.print(
        f"{made.key}: acc {fair.mean:.3f}, fair {fair.angle_radians:.3f}, worst 5 % {fair.worst_5:.3f}, "
        f"best 5 % {fair.best_5:.3f}"
    )


if __name__ == "__main__":
    main()
