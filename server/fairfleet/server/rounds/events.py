"""The events that move a round, and the actions that the server must then perform.

Events are stored by class name and field name (`rounds.serialization`), so neither may change.
Actions are safe to repeat, because recovery repeats the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairfleet.server.rounds.round_state import Clients

# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientsChosen:
    """Clients were selected to train or to evaluate, depending on the phase of the round."""

    clients: Clients
    wanted: int = 0  # the first so many of their updates are enough; 0: all


@dataclass(frozen=True)
class UpdateStored:
    """The update of a client is stored."""

    client: str


@dataclass(frozen=True)
class Evaluated:
    """A client has reported its evaluation."""

    client: str


@dataclass(frozen=True)
class ClientLost:
    """A client left, its lease ended, or it reported that it cannot do the task."""

    client: str
    gave_up: bool = False  # the client reported so itself


@dataclass(frozen=True)
class ClientRevoked:
    """A client was revoked and never comes back.

    The round stops waiting for it, and removes its update while updates are being collected.
    """

    client: str


@dataclass(frozen=True)
class ClientRetired(ClientLost):
    """A client is lost because its owner lets it take part no more.

    The round needs no other in its place. An update that it sent still counts.
    """


@dataclass(frozen=True)
class DeadlinePassed:
    """The deadline of this attempt has passed."""

    attempt: int


@dataclass(frozen=True)
class StepProposed:
    """Aggregation is done, and these clients are to try its step before it is taken.

    There may be none: no client can try the step, or none needs to.
    """

    clients: Clients


@dataclass(frozen=True)
class StepTried:
    """A client's answer about the step is stored, or the client reported that it cannot try it."""

    client: str


@dataclass(frozen=True)
class ModelStored:
    """The round's model is committed as this version."""

    version: int


@dataclass(frozen=True)
class Paused:
    """An operator paused the federation."""


@dataclass(frozen=True)
class Resumed:
    """An operator resumed the federation."""


@dataclass(frozen=True)
class StopRequested:
    """The federation is to end after the current round."""

    reason: str


@dataclass(frozen=True)
class Continued:
    """An operator lets the federation go on, or withdraws its end before the round is over.

    With `from_version`, the model of that version was committed again as `version`.
    """

    version: int
    from_version: int | None = None


Event = (
    ClientsChosen
    | UpdateStored
    | Evaluated
    | ClientLost
    | ClientRevoked
    | ClientRetired
    | DeadlinePassed
    | StepProposed
    | StepTried
    | ModelStored
    | Paused
    | Resumed
    | StopRequested
    | Continued
)
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}

# ---- actions: safe to repeat -------------------------------------------------------------------


@dataclass(frozen=True)
class Train:
    """Give these clients a training task."""

    clients: Clients


@dataclass(frozen=True)
class Evaluate:
    """Give these clients an evaluation task."""

    clients: Clients


@dataclass(frozen=True)
class Wait:
    """Wait for clients until the deadline."""


@dataclass(frozen=True)
class Release:
    """Withdraw the tasks of these clients: their results are no longer needed."""

    clients: Clients


@dataclass(frozen=True)
class Aggregate:
    """Aggregate the updates of these clients."""

    clients: Clients


@dataclass(frozen=True)
class Verify:
    """Let these clients try the proposed step."""

    clients: Clients


@dataclass(frozen=True)
class Commit:
    """Commit the step that the clients' answers support."""


@dataclass(frozen=True)
class Finish:
    """End the federation."""

    reason: str


Action = Train | Evaluate | Wait | Release | Aggregate | Verify | Commit | Finish
