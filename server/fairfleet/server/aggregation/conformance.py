"""Checks the rules against a folder of test vectors, with the real engine, rules and optimizers.

The folder has the format of the shared test vectors: sets.json, inputs.npz, cases.json and
expected.npz. This module knows no formula of a rule. It prepares the inputs, runs the rounds and
compares the steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.results import Direction, Outcome, ServerState
from fairfleet.server.gram.blocks import Matrix
from fairfleet.server.rules import Report, Vector
from fairfleet.server.rules.registry import Recipe, recipe

Record = Mapping[str, Any]
FILES = ("sets.json", "inputs.npz", "cases.json", "expected.npz")

# Parameters that the folder's definition of a rule implies and that differ from our defaults.
IMPLIED_PARAMETERS = {"adafed": {"length": "literal", "phi_norm": "none"}}
# Facts about the set of inputs that a case lists among the rule's parameters.
SET_FACTS = {"n_total", "rounds", "grad_norms"}


class BrokenVectors(ValueError):
    """Raised for a folder that is not in the format of the test vectors."""


@dataclass(frozen=True)
class Vectors:
    """The content of a folder of test vectors; arrays are named as in its npz files."""

    sets: Mapping[str, Record]
    arrays: Mapping[str, Matrix]
    cases: list[Record]
    expected: Mapping[str, Matrix]


@dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    `error` is relative to the norm of the expected step; `strain` is the used share of the
    tolerance.
    """

    case: str
    rule: str
    passed: bool
    error: float
    strain: float
    reason: str = ""


@dataclass(frozen=True)
class PlayedCase:
    """The rounds of a case with the step, direction and outcome of each."""

    entries: list[Entry]
    steps: Matrix
    choices: list[Direction]
    outcomes: list[Outcome]


def load(folder: Path) -> Vectors:
    """Read a folder of vectors; raise BrokenVectors, which names the problem."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise BrokenVectors(
            f"{folder} has no {', '.join(missing)}; expected a folder with {', '.join(FILES)}"
        )
    try:
        sets = json.loads((folder / "sets.json").read_text())
        cases = json.loads((folder / "cases.json").read_text())
        arrays = [
            dict(np.load(folder / name, allow_pickle=False))
            for name in ("inputs.npz", "expected.npz")
        ]
    except Exception as error:  # a damaged zip can raise almost anything
        raise BrokenVectors(
            f"{folder} cannot be read: {error}; generate or copy the folder again"
        ) from error
    if (
        not isinstance(sets, dict)
        or not isinstance(cases, list)
        or not all(isinstance(case, dict) for case in cases)
    ):
        raise BrokenVectors(
            f"{folder}: expected an object in sets.json and a list of objects in cases.json"
        )
    if not cases:
        raise BrokenVectors(f"{folder}/cases.json has no case; there is nothing to check")
    for case in cases:
        if lacking := [key for key in ("id", "rule", "set", "check") if key not in case]:
            raise BrokenVectors(
                f"{folder}/cases.json: case {case.get('id', case)!r} has no {', '.join(lacking)}"
            )
    return Vectors(sets, arrays[0], cases, arrays[1])


def check(vectors: Vectors) -> Iterator[CaseResult]:
    """Yield the result of each case."""
    for case in vectors.cases:
        yield check_case(vectors, case)


def check_case(vectors: Vectors, case: Record) -> CaseResult:
    """Run one case and compare its steps. A case that cannot be run fails with the reason."""
    try:
        played = play(vectors, case)
        return compare(vectors, case, played)
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        return CaseResult(
            case["id"], case["rule"], False, np.inf, np.inf, f"{type(error).__name__}: {reason}"
        )


def play(vectors: Vectors, case: Record) -> PlayedCase:
    """Run all rounds of a case; state and history are passed from round to round."""
    case_rule, state = case_recipe(case), ServerState()
    entries = list(rounds(vectors, case))
    history = History(entries[0].layers, precision="float64")
    steps, choices, outcomes = [], [], []
    for entry in entries:
        for client, past_round, row in entry.past:
            history.put(client, past_round, row)
        aggregation = Aggregation(
            case_rule,
            entry.layers,
            round_number=entry.round,
            history=history,
            expected=sorted(entry.rows),
        )
        aggregation.extend(entry.rows)
        choices.append(aggregation.direction(entry.reports, state.rule))
        outcomes.append(aggregation.finish(np.zeros(sum(entry.layers)), entry.reports, state))
        steps.append(outcomes[-1].step * searched_rate(case_rule, choices[-1], entry))
        state = outcomes[-1].state
        aggregation.remember(entry.rows)
    return PlayedCase(entries, np.array(steps), choices, outcomes)


def rounds(vectors: Vectors, case: Record) -> Iterator[Entry]:
    """Yield the rounds of a case, in order."""
    given = vectors.sets[case["set"]]
    kinds = {"sequence": sequence_rounds, "quadratic": quadratic_rounds}
    return kinds.get(given["kind"], single_round)(vectors, case, given)


def case_recipe(case: Record) -> Recipe:
    """Return the rule and optimizer of a case, with its parameters."""
    parameters = {
        key: value for key, value in case.get("params", {}).items() if key not in SET_FACTS
    }
    return recipe(case["rule"], **{**IMPLIED_PARAMETERS.get(case["rule"], {}), **parameters})


@dataclass(frozen=True)
class Entry:
    """One round of a case.

    Clients are named by their row number, so the order of ids is the order of rows.
    """

    round: int
    layers: list[int]
    rows: dict[str, Vector]
    reports: dict[str, Report]
    past: list[tuple[str, int, Vector]]
    losses_after: Callable[[Vector], Vector] | None = None  # losses after a step


def single_round(vectors: Vectors, case: Record, given: Record) -> Iterator[Entry]:
    """Yield the round of a set that has one matrix of updates, with its history."""
    rows = vectors.arrays[f"{case['set']}.G"]
    clients = given.get("clients", list(range(len(rows))))
    present = {client: row_name(index) for index, client in enumerate(clients)}
    past_rows = vectors.arrays.get(f"{case['set']}.H", np.zeros((0, rows.shape[1])))
    past = [
        (present.get(client, f"absent {client}"), past_round, row)
        for client, past_round, row in zip(
            given.get("hist_client", ()), given.get("hist_round", ()), past_rows, strict=True
        )
    ]
    facts = {
        **given,
        "grad_norms": case.get("params", {}).get("grad_norms", given.get("grad_norms")),
    }
    indices = range(len(rows))
    yield Entry(
        given.get("t", 0),
        given.get("layers", [rows.shape[1]]),
        named(rows, indices),
        reports(facts, indices),
        past,
    )


def sequence_rounds(vectors: Vectors, case: Record, given: Record) -> Iterator[Entry]:
    """Yield the rounds of a set that has one matrix of updates per round."""
    matrices = vectors.arrays[f"{case['set']}.G"]
    layers = given.get("layers", [matrices.shape[2]])
    for index, rows in enumerate(matrices):
        indices = case["participants"][index] if "participants" in case else range(len(rows))
        facts = {key: value[index] if key in PER_ROUND else value for key, value in given.items()}
        yield Entry(index, layers, named(rows, indices), reports(facts, indices), [])


def quadratic_rounds(vectors: Vectors, case: Record, given: Record) -> Iterator[Entry]:
    """Yield the round of a set whose clients have quadratic losses, which can be evaluated."""
    curvature, best, theta = (
        vectors.arrays[f"{case['set']}.{name}"] for name in ("A", "x_star", "theta")
    )
    indices = range(len(curvature))

    def losses_after(step: Vector) -> Vector:
        """Return the loss of each client after a step."""
        return np.asarray(0.5 * (curvature * (theta - step - best) ** 2).sum(axis=1))

    facts = {"losses": losses_after(np.zeros(len(theta))), **given}
    yield Entry(
        0,
        [len(theta)],
        named(curvature * (theta - best), indices),
        reports(facts, indices),
        [],
        losses_after,
    )


PER_ROUND = {"losses", "accs", "freqs", "grad_norms", "steps"}
FIELDS = {
    "samples": "n",
    "loss": "losses",
    "first_loss": "losses0",
    "accuracy": "accs",
    "participations": "freqs",
    "steps": "steps",
    "gradient_norm": "grad_norms",
    "local_lr": "local_lr",
}


def row_name(index: int) -> str:
    """Return the client id of a row."""
    return f"{index:06d}"


def named(rows: Matrix, indices: Iterable[int]) -> dict[str, Vector]:
    """Return the rows with these indices, by client id."""
    return {row_name(index): rows[index] for index in indices}


def reports(facts: Record, indices: Iterable[int]) -> dict[str, Report]:
    """Return the reports of the clients with these indices, as the facts of the set define them."""
    return {row_name(index): _report(facts, index) for index in indices}


def _report(facts: Record, index: int) -> Report:
    values = {"samples": 1.0, "loss": 0.0}
    for field, fact in FIELDS.items():
        value = facts.get(fact)
        if value is not None:
            values[field] = value if np.ndim(value) == 0 else float(value[index])
    return Report(**values)


def searched_rate(recipe: Recipe, choice: Direction, entry: Entry) -> float:
    """Return the factor of eta that the line search finds; 1 for rules without a line search."""
    trials, losses_after, eta = choice.choice.trials, entry.losses_after, recipe.optimizer.eta
    vector = choice.vector.astype(np.float64, copy=False)
    if trials is None or trials.search is None or losses_after is None or not vector.any():
        return 1.0
    factors = [trials.factor(halvings) for halvings in range(trials.halvings + 1)]
    after = np.array([losses_after(eta * factor * vector) for factor in factors])
    cohort = choice.cohort
    result = trials.search(cohort.clients, cohort.losses, after, rate=eta)
    return factors[result.halvings] if result else 1.0


def compare(vectors: Vectors, case: Record, played: PlayedCase) -> CaseResult:
    """Compare the steps of a case as its `check` says."""
    if case["check"] == "exact":
        return compare_exact(case, played.steps, vectors.expected[case["id"].replace("/", "|")])
    if case["check"] == "sound":
        return compare_sound(case, played)
    raise ValueError(f"check is {case['check']!r}; expected 'exact' or 'sound'")


def compare_exact(case: Record, steps: Matrix, expected: Matrix) -> CaseResult:
    """Compare the steps with the expected ones, within the tolerances of the case."""
    expected = expected.reshape(-1, expected.shape[-1])
    if steps.shape != expected.shape:
        raise ValueError(f"steps have shape {steps.shape}; the folder expects {expected.shape}")
    distances = np.linalg.norm(steps - expected, axis=1)
    sizes = np.linalg.norm(expected, axis=1)
    allowed = case.get("rtol", 0.0) * sizes + 10.0 * case.get("atol", 0.0)
    passed = bool((distances <= allowed).all())
    error = largest_ratio(distances, sizes)
    return CaseResult(
        case["id"],
        case["rule"],
        passed,
        error,
        largest_ratio(distances, allowed),
        "" if passed else "wrong step",
    )


def largest_ratio(values: Vector, references: Vector) -> float:
    """Return the largest ratio of a value to its reference; 0 / 0 counts as 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(values == 0.0, 0.0, values / references).max())


def compare_sound(case: Record, played: PlayedCase) -> CaseResult:
    """Check the requirements of a case that has no unique right step."""
    broken = {
        f"{name} {bound}"
        for need in case["require"]
        for name, bound in need.items()
        for entry, step in zip(played.entries, played.steps, strict=True)
        if not holds(name, bound, np.array(list(entry.rows.values())), step, groups(case, entry))
    }
    reason = f"does not hold: {', '.join(sorted(broken))}" if broken else ""
    return CaseResult(case["id"], case["rule"], not broken, 0.0, 0.0, reason)


def groups(case: Record, entry: Entry) -> list[list[int]]:
    """Return the merged blocks that the case expects, or else the layers, as (start, stop)."""
    edges = np.cumsum([0, *entry.layers]).tolist()
    return case.get("expect", {}).get("groups") or [list(pair) for pair in pairwise(edges)]


def holds(name: str, bound: Any, rows: Matrix, step: Vector, groups: list[list[int]]) -> bool:
    """Return whether a step meets one requirement. Raises ValueError for an unknown one."""
    match name:
        case "finite":
            return bool(np.isfinite(step).all()) or not bound
        case "norm_le" | "zero_step_le":
            return bool(np.linalg.norm(step) <= bound)
        case "progress":
            return bool(step.any()) or not bound
        case "no_conflict":
            return harms_no_client(rows, step, bound)
        case "no_layer_conflict":
            return all(
                harms_no_client(rows[:, start:stop], step[start:stop], bound)
                for start, stop in groups
            )
    raise ValueError(f"requirement {name!r} is not known to this version")


def harms_no_client(rows: Matrix, step: Vector, slack: float) -> bool:
    """Return whether each row's cosine with the step is at least -slack."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(step)
    return bool((rows @ step >= -slack * lengths).all())
