"""The diagram and the table in docs/rounds.md, made from the state machine itself.

    python docs/rounds_diagram.py            writes them anew
    python docs/rounds_diagram.py --check    exits with 1 if they are not up to date

Every state that two clients can bring a round into is visited, and every event tried on it; what `step` does with it
is what is drawn.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

from fairfleet.server import rounds
from fairfleet.server.rounds import Event, IllegalEvent, Phase, Policy, Round, step

PAGE = Path(__file__).with_name("rounds.md")
BEGIN, END = "<!-- made by docs/rounds_diagram.py -->\n", "<!-- until here -->\n"
CLIENTS = ("a", "b")
POLICIES = [Policy(2, quorum, evaluate_every=every) for quorum in (0.5, 1.0) for every in (0, 1)]
LAST_ATTEMPT = 1

Transition = tuple[Phase, str, Phase]  # from, event, to
Edge = tuple[Phase, Phase]


def subsets(clients: frozenset[str]) -> Iterator[frozenset[str]]:
    ordered = sorted(clients)
    return map(frozenset, chain.from_iterable(combinations(ordered, size) for size in range(len(ordered) + 1)))


def events(round: Round) -> Iterator[Event]:
    """All that may happen to it, and some that may not."""
    for chosen in subsets(frozenset(CLIENTS)):
        yield rounds.ClientsChosen(chosen)
    for asked in subsets(round.received):
        yield rounds.StepProposed(asked)
    for client in CLIENTS:
        for kind in (rounds.UpdateStored, rounds.StepTried, rounds.Evaluated, rounds.ClientLost, rounds.ClientRevoked):
            yield kind(client)
    yield rounds.DeadlinePassed(round.attempt)
    yield rounds.ModelStored(round.number + 1)
    yield rounds.StopRequested("enough")


def transitions() -> dict[Transition, set[str]]:
    """What leads from phase to phase, and the actions that may come with it."""
    found: defaultdict[Transition, set[str]] = defaultdict(set)
    for policy in POLICIES:
        seen, left = set[Round](), [Round(0)]
        while left:
            round = left.pop()
            if round in seen:
                continue
            seen.add(round)
            for event in events(round):
                try:
                    after, actions = step(round, event, policy)
                except IllegalEvent:
                    continue
                if after.phase is not round.phase or after.number != round.number:
                    found[round.phase, type(event).__name__, after.phase] |= {type(a).__name__ for a in actions}
                left.append(replace(after, attempt=min(after.attempt, LAST_ATTEMPT)))
    return found


def drawn() -> str:
    """A diagram that GitHub and most viewers of Markdown draw, and the same as a table."""
    events_of, actions_of = defaultdict[Edge, set[str]](set), defaultdict[Edge, set[str]](set)
    for (before, event, after), actions in transitions().items():
        events_of[before, after].add(event)
        actions_of[before, after] |= actions
    order = list(Phase)
    edges = sorted(events_of, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))
    arrows = [f"    {b.value} --> {a.value}: {listed(events_of[b, a])}" for b, a in edges]
    rows = [f"| {b.value} | {a.value} | {listed(events_of[b, a])} | {listed(actions_of[b, a])} |" for b, a in edges]
    diagram = ["```mermaid", "stateDiagram-v2", "    [*] --> waiting", *arrows, "    finished --> [*]", "```"]
    table = ["| from | to | on | may have the server |", "|---|---|---|---|", *rows]
    return "\n".join([*diagram, "", *table, ""])


def listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "-"


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{drawn()}{END}{rest.partition(END)[2]}"


def main() -> int:
    wanted = page()
    if "--check" in sys.argv[1:]:
        fresh = PAGE.read_text(encoding="utf-8") == wanted
        print("docs/rounds.md is up to date" if fresh else "run `python docs/rounds_diagram.py`")
        return 0 if fresh else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
