"""FedMGDA+, Table 7: Adult with two clients, of which the doctors overstate their loss."""

from __future__ import annotations

from typing import Any

from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.reproductions.base import (
    Claim,
    ClaimVerdict,
    Column,
    Lines,
    Reproduction,
    client_accuracy,
    pooled_accuracy,
)

DOCTORS, OTHERS = 0, 1  # Numbers of the clients.
ROUNDS = 500
SHIFTED = ", shifted"  # Each doctor's place goes to the next row, as in the authors' code.
BASE: dict[str, Any] = {
    "data": "adult",
    "preprocessing": "plain",
    "partition": "user",
    "train_share": 0.8,
    "model": "softmax",
    "plan": {"epochs": 1, "batch_size": 10, "learning_rate": 0.01, "momentum": 0.5},
    "rounds": ROUNDS,
    "evaluate_every": 25,
}


def _biased(strength: float) -> dict[str, Any]:
    attack = {"kind": "loss_bias", "clients": ["doctorate"], "strength": strength}
    return {"attacks": [attack]} if strength else {}


def _rules(rounds: int) -> list[dict[str, Any]]:
    mgda = f"fedmgda_plus,epsilon=1,eta=1,schedule=fedmgda,decay=0.3333333,rounds={rounds}"
    afl = {"rule": "afl,lr_lambda=0.5", "judged": "average"}
    q = {"rule": "qfedavg,q=5", "loss_total": True}
    rules: list[dict[str, Any]] = [
        {"label": "FedMGDA+ bias 0", "rule": mgda},
        {"label": "FedMGDA+ bias 10000", "rule": mgda, "behaviour": _biased(10000)},
        {"label": "AFL bias 0", **afl},
        {"label": "AFL bias 1", **afl, "behaviour": _biased(1)},
        {"label": "q-FedAvg bias 0", **q},
        {"label": "q-FedAvg bias 10000", **q, "behaviour": _biased(10000)},
    ]
    return rules + [
        {**rule, "label": f"{rule['label']}{SHIFTED}", "data": "adult,shift=1"} for rule in rules
    ]


COLUMNS = (
    Column("uniform", pooled_accuracy),
    Column("PhD", client_accuracy(DOCTORS), tolerance=None),
    Column("non-PhD", client_accuracy(OTHERS)),
)


def _row(*figures: float) -> dict[str, float]:
    return {column.name: figure for column, figure in zip(COLUMNS, figures, strict=True)}


PUBLISHED = {
    "FedMGDA+ bias 0": _row(83.24, 76.58, 83.32),
    "FedMGDA+ bias 10000": _row(83.24, 76.58, 83.32),
    "AFL bias 0": _row(83.26, 77.90, 83.32),
    "AFL bias 1": _row(81.86, 74.25, 81.94),
    "q-FedAvg bias 0": _row(83.26, 76.80, 83.33),
    "q-FedAvg bias 10000": _row(81.07, 73.48, 81.16),
}


def _invariant(suffix: str = "") -> Claim:
    """Return the claim that a bias does not change FedMGDA+."""
    first, second = (f"FedMGDA+ bias {bias}{suffix}" for bias in ("0", "10000"))

    def _claim(lines: Lines) -> ClaimVerdict | None:
        if not {first, second} <= lines.keys():
            return None
        same = all(
            lines[first].value(column.name) == lines[second].value(column.name)
            for column in COLUMNS
        )
        effect = (
            "is the same to the last digit whatever the bias" if same else "depends on the bias"
        )
        return ClaimVerdict(same, f"FedMGDA+{suffix} {effect}")

    return _claim


def _harmed(rule: str, bias: str, suffix: str = "") -> Claim:
    """Return the claim that a bias costs this rule a point or more."""
    honest, biased = f"{rule} bias 0{suffix}", f"{rule} bias {bias}{suffix}"

    def _claim(lines: Lines) -> ClaimVerdict | None:
        if not {honest, biased} <= lines.keys():
            return None
        loss = lines[honest].value("uniform") - lines[biased].value("uniform")
        return ClaimVerdict(
            loss >= 1.0,
            f"{rule}{suffix} loses {loss:.2f} points on the pooled test set to a bias of {bias}",
        )

    return _claim


ADULT = Reproduction(
    name="fedmgda-adult",
    title="FedMGDA+, Table 7: Adult with a biased loss",
    about=(
        "Two clients: the people of the training file with a doctorate (413) and all others "
        "(32,148). Each trains on 80 % of its records and is evaluated on the published test file "
        "(181 and 16,100). Logistic regression on the 99 binary features, SGD with learning rate "
        "0.01 and momentum 0.5, batches of 10, one epoch per round, 500 rounds. The client with "
        "the doctorates adds a constant to the loss that it reports. AFL is evaluated with the "
        "mean of its models; q-FedAvg receives summed losses. The accuracy of the doctorates is "
        "shown but not compared: one of the 181 is half a point."
    ),
    sweep=Sweep.model_validate(
        {"name": "fedmgda-adult", "base": BASE, "rules": _rules(ROUNDS), "seeds": [0, 1, 2]}
    ),
    quick=Sweep.model_validate(
        {
            "name": "fedmgda-adult-quick",
            "base": {**BASE, "rounds": 20, "evaluate_every": 5},
            "rules": _rules(20),
            "seeds": [0],
        }
    ),
    columns=COLUMNS,
    # Pictures show honest clients only, which differ with and without a bias: they would mislead.
    not_drawn=frozenset(rule["label"] for rule in _rules(ROUNDS)),
    published=PUBLISHED | {f"{label}{SHIFTED}": figures for label, figures in PUBLISHED.items()},
    claims=tuple(
        claim
        for suffix in ("", SHIFTED)
        for claim in (
            _invariant(suffix),
            _harmed("AFL", "1", suffix),
            _harmed("q-FedAvg", "10000", suffix),
        )
    ),
    notes=(
        "The authors' code counts rows from 1 where they begin at 0. So its client 'PhD' trains on "
        "the row after that of each doctorate. The lines 'shifted' do the same, and this explains "
        "the table: all six are within 2 points of the published figures, and AFL with a bias of 1 "
        "within 0.1. With the right rows, AFL ends 4.2 points below the published figure without a "
        "bias. The harm of a bias is then far greater than published: 13 points for AFL and 27 for "
        "q-FedAvg. The reason is that a model that fits the doctorates alone fits the others "
        "badly, and a model that fits rows of other people does not. FedMGDA+ does not read "
        "losses, so a bias changes no digit.",
        "Without a bias, q-FedAvg reaches 38 for the doctorates with the right rows, and 76.24 "
        "with the rows shifted; 76.80 is published. With the right rows, no other client has a "
        "doctorate. So only one client with 330 training samples teaches the model what the column "
        "Doctorate means, and a rule that receives summed losses gives it little weight. With the "
        "rows shifted, the other client has the rows of the doctorates.",
        "The bias of q-FedAvg is added to the mean loss, which is then summed over the samples. "
        "When it was added to the sum instead, a bias of 10000 changed nothing (83.28 with the "
        "rows shifted, in a run that is not kept).",
    ),
)
