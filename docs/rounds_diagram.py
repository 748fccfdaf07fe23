"""Make the diagram and the table in docs/explanation/rounds.md from the state machine.

    python docs/rounds_diagram.py            writes them
    python docs/rounds_diagram.py --check    exits with 1 if they are out of date

It visits every state that a round with two clients can reach, and tries every event in each. It
draws what `step` returns.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Event, IllegalEvent, Phase, Policy, Round, step

PAGE = Path(__file__).parent / "explanation" / "rounds.md"
BEGIN, END = "<!-- made by docs/rounds_diagram.py -->\n", "<!-- until here -->\n"
CLIENTS = ("a", "b")
ROUNDS = 2
POLICIES = [
    Policy(ROUNDS, quorum, evaluate_every=every) for quorum in (0.5, 1.0) for every in (0, 1)
]
LAST_ATTEMPT = 1

Transition = tuple[Phase, str, Phase]  # from, event, to
Edge = tuple[Phase, Phase]


def subsets(clients: frozenset[str]) -> Iterator[frozenset[str]]:
    ordered = sorted(clients)
    return map(
        frozenset,
        chain.from_iterable(combinations(ordered, size) for size in range(len(ordered) + 1)),
    )


def events(round_: Round) -> Iterator[Event]:
    """Return every event that can occur in a round, and some that cannot."""
    for chosen in subsets(frozenset(CLIENTS)):
        yield state_machine.ClientsChosen(chosen)
    for asked in subsets(round_.received):
        yield state_machine.StepProposed(asked)
    for client in CLIENTS:
        for kind in (
            state_machine.UpdateStored,
            state_machine.StepTried,
            state_machine.Evaluated,
            state_machine.ClientLost,
            state_machine.ClientRevoked,
            state_machine.ClientRetired,
        ):
            yield kind(client)
        yield state_machine.ClientLost(client, gave_up=True)
    yield state_machine.DeadlinePassed(round_.attempt)
    yield state_machine.ModelStored(round_.number + 1)
    yield state_machine.StopRequested("enough")
    # The server refuses to continue where no round is left.
    if round_.number < ROUNDS:
        yield state_machine.Continued(round_.number)
    if round_.number + 1 < ROUNDS:
        yield state_machine.Continued(round_.number + 1, from_version=0)


def transitions() -> dict[Transition, set[str]]:
    """Return the events between each pair of phases, and the actions that they can cause."""
    actions_of: defaultdict[Transition, set[str]] = defaultdict(set)
    for policy in POLICIES:
        seen, unvisited = set[Round](), [Round(0)]
        while unvisited:
            round_ = unvisited.pop()
            if round_ in seen:
                continue
            seen.add(round_)
            for event in events(round_):
                try:
                    after, actions = step(round_, event, policy)
                except IllegalEvent:
                    continue
                if after.phase is not round_.phase or after.number != round_.number:
                    actions_of[round_.phase, type(event).__name__, after.phase] |= {
                        type(a).__name__ for a in actions
                    }
                counted = {"attempt": after.attempt, "deadlines_missed": after.deadlines_missed}
                unvisited.append(
                    replace(
                        after, **{name: min(count, LAST_ATTEMPT) for name, count in counted.items()}
                    )
                )
    return actions_of


def drawn() -> str:
    """Return the transitions as a Mermaid diagram and as a table."""
    events_of, actions_of = defaultdict[Edge, set[str]](set), defaultdict[Edge, set[str]](set)
    for (before, event, after), actions in transitions().items():
        events_of[before, after].add(event)
        actions_of[before, after] |= actions
    order = list(Phase)
    edges = sorted(events_of, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))
    arrows = [f"    {b.value} --> {a.value}: {listed(events_of[b, a])}" for b, a in edges]
    rows = [
        f"| {b.value} | {a.value} | {listed(events_of[b, a])} | {listed(actions_of[b, a])} |"
        for b, a in edges
    ]
    diagram = [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> waiting",
        *arrows,
        "    finished --> [*]",
        "```",
    ]
    table = ["| from | to | on | may have the server |", "|---|---|---|---|", *rows]
    return "\n".join([*diagram, "", *table, ""])


def listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "-"


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{drawn()}{END}{rest.partition(END)[2]}"


def main() -> int:
    expected = page()
    if "--check" in sys.argv[1:]:
        fresh = PAGE.read_text(encoding="utf-8") == expected
        print(
            "docs/explanation/rounds.md is up to date"
            if fresh
            else "run `python docs/rounds_diagram.py`"
        )
        return 0 if fresh else 1
    PAGE.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
