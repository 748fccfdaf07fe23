"""Checks the rules against a folder of test vectors: every case through the real engine, rules and optimizers.

The format is that of the project's shared vectors: sets.json, inputs.npz, cases.json, expected.npz. Nothing here
knows a formula of a rule; it only lays out the inputs, runs the rounds and compares the steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.server.aggregation import Aggregation, Direction, Outcome, ServerState
from fairfleet.server.blocks import Matrix
from fairfleet.server.history import History
from fairfleet.server.rules.base import Report, Vector
from fairfleet.server.rules.registry import Recipe, recipe

Record = Mapping[str, Any]
FILES = ("sets.json", "inputs.npz", "cases.json", "expected.npz")

# How the folder's definitions are spelled with our parameters, where a default of ours says otherwise.
MEANT = {"adafed": {"length": "literal", "phi_norm": "none"}}
NOT_OURS = {"n_total", "rounds", "grad_norms"}  # facts about the set, given among the parameters


class BrokenVectors(ValueError):
    """A folder that is not in the format of the vectors."""


@dataclass(frozen=True)
class Vectors:
    sets: Mapping[str, Record]
    arrays: Mapping[str, Matrix]
    cases: list[Record]
    expected: Mapping[str, Matrix]


@dataclass(frozen=True)
class Verdict:
    """How one case went. `error` is relative to the wanted step; `strain` is the share of the tolerance used."""

    case: str
    rule: str
    passed: bool
    error: float
    strain: float
    reason: str = ""


@dataclass(frozen=True)
class Played:
    """The rounds of a case, and per round the step, what the rule chose and what came of it."""

    entries: list[Entry]
    steps: Matrix
    choices: list[Direction]
    outcomes: list[Outcome]


def load(folder: Path) -> Vectors:
    """Reads a folder of vectors, or says what is wrong with it."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise BrokenVectors(f"{folder} has no {', '.join(missing)}; expected a folder with {', '.join(FILES)}")
    try:
        sets = json.loads((folder / "sets.json").read_text())
        cases = json.loads((folder / "cases.json").read_text())
        arrays = [dict(np.load(folder / name, allow_pickle=False)) for name in ("inputs.npz", "expected.npz")]
    except Exception as error:  # a damaged zip can raise almost anything
        raise BrokenVectors(f"{folder} cannot be read: {error}; make it again or copy it anew") from error
    if not isinstance(sets, dict) or not isinstance(cases, list) or not all(isinstance(c, dict) for c in cases):
        raise BrokenVectors(f"{folder}: expected an object in sets.json and a list of objects in cases.json")
    if not cases:
        raise BrokenVectors(f"{folder}/cases.json has no case; there is nothing to check")
    for case in cases:
        if lacking := [key for key in ("id", "rule", "set", "check") if key not in case]:
            raise BrokenVectors(f"{folder}/cases.json: case {case.get('id', case)!r} has no {', '.join(lacking)}")
    return Vectors(sets, arrays[0], cases, arrays[1])


def check(vectors: Vectors) -> Iterator[Verdict]:
    for case in vectors.cases:
        yield check_case(vectors, case)


def check_case(vectors: Vectors, case: Record) -> Verdict:
    """Runs and compares one case. A case that cannot be run has failed, and says why."""
    try:
        played = play(vectors, case)
        return compare(vectors, case, played)
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        return Verdict(case["id"], case["rule"], False, np.inf, np.inf, f"{type(error).__name__}: {reason}")


def play(vectors: Vectors, case: Record) -> Played:
    """All the rounds of a case, with state and history carried over."""
    made, state = case_recipe(case), ServerState()
    entries = list(rounds(vectors, case))
    history = History(entries[0].layers, precision="float64")
    steps, choices, outcomes = [], [], []
    for entry in entries:
        for client, past_round, row in entry.past:
            history.put(client, past_round, row)
        whole = Aggregation(made, entry.layers, round=entry.round, history=history, expected=sorted(entry.rows))
        whole.extend(entry.rows)
        choices.append(whole.direction(entry.reports, state.rule))
        outcomes.append(whole.finish(np.zeros(sum(entry.layers)), entry.reports, state))
        steps.append(outcomes[-1].step * searched_rate(made, choices[-1], entry))
        state = outcomes[-1].state
        whole.remember(entry.rows)
    return Played(entries, np.array(steps), choices, outcomes)


def rounds(vectors: Vectors, case: Record) -> Iterator[Entry]:
    given = vectors.sets[case["set"]]
    kinds = {"sequence": sequence_rounds, "quadratic": quadratic_rounds}
    return kinds.get(given["kind"], single_round)(vectors, case, given)


def case_recipe(case: Record) -> Recipe:
    parameters = {key: value for key, value in case.get("params", {}).items() if key not in NOT_OURS}
    return recipe(case["rule"], **{**MEANT.get(case["rule"], {}), **parameters})


@dataclass(frozen=True)
class Entry:
    """One round of a case. Clients are named by their row, so that the order of ids is the order of rows."""

    round: int
    layers: list[int]
    rows: dict[str, Vector]
    reports: dict[str, Report]
    past: list[tuple[str, int, Vector]]
    losses_after: Callable[[Vector], Vector] | None = None  # a step -> losses


def single_round(vectors: Vectors, case: Record, given: Record) -> Iterator[Entry]:
    rows = vectors.arrays[f"{case['set']}.G"]
    clients = given.get("clients", list(range(len(rows))))
    present = {client: row_name(at) for at, client in enumerate(clients)}
    past_rows = vectors.arrays.get(f"{case['set']}.H", np.zeros((0, rows.shape[1])))
    past = [
        (present.get(client, f"absent {client}"), past_round, row)
        for client, past_round, row in zip(
            given.get("hist_client", ()), given.get("hist_round", ()), past_rows, strict=True
        )
    ]
    facts = {**given, "grad_norms": case.get("params", {}).get("grad_norms", given.get("grad_norms"))}
    who = range(len(rows))
    yield Entry(given.get("t", 0), given.get("layers", [rows.shape[1]]), named(rows, who), reports(facts, who), past)


def sequence_rounds(vectors: Vectors, case: Record, given: Record) -> Iterator[Entry]:
    rows = vectors.arrays[f"{case['set']}.G"]
    for at, here in enumerate(rows):
        who = case["participants"][at] if "participants" in case else range(len(here))
        facts = {key: value[at] if key in PER_ROUND else value for key, value in given.items()}
        yield Entry(at, given.get("layers", [rows.shape[2]]), named(here, who), reports(facts, who), [])


def quadratic_rounds(vectors: Vectors, case: Record, given: Record) -> Iterator[Entry]:
    curvature, best, theta = (vectors.arrays[f"{case['set']}.{name}"] for name in ("A", "x_star", "theta"))
    who = range(len(curvature))

    def losses_after(step: Vector) -> Vector:
        return np.asarray(0.5 * (curvature * (theta - step - best) ** 2).sum(axis=1))

    facts = {"losses": losses_after(np.zeros(len(theta))), **given}
    yield Entry(0, [len(theta)], named(curvature * (theta - best), who), reports(facts, who), [], losses_after)


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


def row_name(at: int) -> str:
    return f"{at:06d}"


def named(rows: Matrix, who: Any) -> dict[str, Vector]:
    return {row_name(at): rows[at] for at in who}


def reports(facts: Record, who: Any) -> dict[str, Report]:
    def value(field: str, at: int) -> float | None:
        known = facts.get(FIELDS[field])
        return known if known is None or np.ndim(known) == 0 else float(known[at])

    usual = {"samples": 1.0, "loss": 0.0}
    return {
        row_name(at): Report(**{**usual, **{f: v for f in FIELDS if (v := value(f, at)) is not None}}) for at in who
    }


def searched_rate(made: Recipe, choice: Direction, entry: Entry) -> float:
    """A line search's, relative to eta; one for rules without."""
    trials, losses_after, eta = choice.choice.trials, entry.losses_after, made.optimizer.eta
    vector = choice.vector.astype(np.float64, copy=False)
    if trials is None or trials.search is None or losses_after is None or not vector.any():
        return 1.0
    factors = [trials.factor(halvings) for halvings in range(trials.halvings + 1)]
    after = np.array([losses_after(eta * factor * vector) for factor in factors])
    cohort = choice.cohort
    found = trials.search(cohort.clients, cohort.losses, after, rate=eta)
    return factors[found.halvings] if found else 1.0


def compare(vectors: Vectors, case: Record, played: Played) -> Verdict:
    if case["check"] == "exact":
        return compare_exact(case, played.steps, vectors.expected[case["id"].replace("/", "|")])
    if case["check"] == "sound":
        return compare_sound(case, played)
    raise ValueError(f"check is {case['check']!r}; expected 'exact' or 'sound'")


def compare_exact(case: Record, steps: Matrix, want: Matrix) -> Verdict:
    want = want.reshape(-1, want.shape[-1])
    if steps.shape != want.shape:
        raise ValueError(f"{steps.shape[0]} steps of {steps.shape[1]} values; the folder expects {want.shape}")
    away = np.linalg.norm(steps - want, axis=1)
    sizes = np.linalg.norm(want, axis=1)
    allowed = case.get("rtol", 0.0) * sizes + 10.0 * case.get("atol", 0.0)
    passed = bool((away <= allowed).all())
    error = worst(away, sizes)
    return Verdict(case["id"], case["rule"], passed, error, worst(away, allowed), "" if passed else "wrong step")


def worst(parts: Vector, wholes: Vector) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(parts == 0.0, 0.0, parts / wholes).max())


def compare_sound(case: Record, played: Played) -> Verdict:
    broken = {
        f"{name} {bound}"
        for need in case["require"]
        for name, bound in need.items()
        for entry, step in zip(played.entries, played.steps, strict=True)
        if not holds(name, bound, np.array(list(entry.rows.values())), step, groups(case, entry))
    }
    reason = f"does not hold: {', '.join(sorted(broken))}" if broken else ""
    return Verdict(case["id"], case["rule"], not broken, 0.0, 0.0, reason)


def groups(case: Record, entry: Entry) -> list[list[int]]:
    """The merged blocks that the case expects; else the layers."""
    edges = np.cumsum([0, *entry.layers]).tolist()
    return case.get("expect", {}).get("groups") or [list(pair) for pair in pairwise(edges)]


def holds(name: str, bound: Any, rows: Matrix, step: Vector, groups: list[list[int]]) -> bool:
    """One requirement on a step that has no unique right answer."""
    match name:
        case "finite":
            return bool(np.isfinite(step).all()) or not bound
        case "norm_le" | "zero_step_le":
            return bool(np.linalg.norm(step) <= bound)
        case "progress":
            return bool(step.any()) or not bound
        case "no_conflict":
            return harmless(rows, step, bound)
        case "no_layer_conflict":
            return all(harmless(rows[:, a:b], step[a:b], bound) for a, b in groups)
    raise ValueError(f"requirement {name!r} is not known to this version")


def harmless(rows: Matrix, step: Vector, slack: float) -> bool:
    return bool((rows @ step >= -slack * np.linalg.norm(rows, axis=1) * np.linalg.norm(step)).all())
