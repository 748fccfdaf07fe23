"""The codecs in which a client's update for a round is accepted.

An update must be in a codec that a TrainTask of its round named to its client. The server remembers
what it named while it runs. For rounds that began before its last start it knows only the settings
of that time, which the database keeps. Then it accepts every codec that those settings could have
named to the client, so no honest update is lost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa

from fairfleet.common.codecs import needs
from fairfleet.common.errors import WrongState
from fairfleet.server.rounds.state_machine import Round
from fairfleet.server.storage.queries import writing
from fairfleet.server.storage.schema import meta
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.codec_selection import CodecPolicy

ROUNDS_REMEMBERED = 8  # for late updates; for older rounds only the settings are known
SETTINGS_REMEMBERED = 16
KEY = "codec_settings"  # of `meta`


@dataclass(frozen=True)
class CodecSettings:
    """Codec settings, and the round in which they took effect.

    `default` is None where an older version of the server kept no record.
    """

    since: int
    default: str | None
    of_clients: dict[str, str]

    def choices(
        self, policy: CodecPolicy, client: str, abilities: Sequence[str]
    ) -> frozenset[str] | None:
        """Return the codecs that these settings could name to the client; None: any."""
        if self.default is None:
            return None
        then = CodecPolicy(self.default, self.of_clients, policy.upload_seconds, policy.raw_bytes)
        with contextlib.suppress(WrongState):  # no common codec: nothing was named
            return then.choices(client, abilities)
        return frozenset()


def settings_since(recorded: Sequence[CodecSettings], round_number: int) -> list[CodecSettings]:
    """Return the settings in effect at some time since the round began, from the oldest on.

    The server may be restarted with other settings in the middle of a round: then both were in
    effect in it. `recorded` has the oldest first.
    """
    ends = [after.since for after in recorded[1:]]
    return [
        settings
        for settings, end in zip(recorded, [*ends, None], strict=True)
        if end is None or end >= round_number
    ]


def record_settings(store: Store, policy: CodecPolicy, current: Round) -> list[CodecSettings]:
    """Store the settings of this start if they changed; return all stored, the oldest first."""
    rows = store.rows(sa.select(meta.c.value).where(meta.c.key == KEY))
    recorded = [CodecSettings(**entry) for entry in json.loads(rows[0].value)] if rows else []
    if not recorded and current != Round(0):
        recorded = [CodecSettings(0, None, {})]
    now = CodecSettings(current.number, policy.default, dict(policy.of_clients))
    if recorded and replace(recorded[-1], since=now.since) == now:
        return recorded
    recorded = [*recorded, now][-SETTINGS_REMEMBERED:]
    value = json.dumps([vars(settings) for settings in recorded])
    store.write(
        writing(meta.delete().where(meta.c.key == KEY)),
        writing(meta.insert(), {"key": KEY, "value": value}),
    )
    return recorded


class CodecAgreements:
    """The codecs that were named to each client. Used on the event loop only."""

    def __init__(
        self, policy: CodecPolicy, recorded: Sequence[CodecSettings], started_in: int
    ) -> None:
        """`started_in` is the round in which this run of the server started.

        An earlier run may have given out tasks of that round.
        """
        self._policy = policy
        self._recorded = recorded
        self._started_in = started_in
        # By round and client, the newest codec last.
        self._named: dict[int, dict[str, tuple[str, ...]]] = {}

    def name_codec(
        self, client: str, round_number: int, abilities: Sequence[str], uplink: float | None = None
    ) -> str:
        """Return the codec for a TrainTask.

        It is the same for every task of the round, unless the client no longer supports it.
        """
        named = self._named_in(round_number).get(client, ())
        if named and needs(named[-1]) <= set(abilities):
            return named[-1]
        codec = self._policy.choose(client, abilities, uplink)
        self._named_in(round_number)[client] = (*(name for name in named if name != codec), codec)
        return codec

    def accepted(
        self, client: str, round_number: int, abilities: Sequence[str]
    ) -> frozenset[str] | None:
        """Return the codecs accepted for the client's update of this round; None: any."""
        named = frozenset(self._named.get(round_number, {}).get(client, ()))
        if named and round_number > self._started_in:
            return named
        choices = [
            past.choices(self._policy, client, abilities)
            for past in settings_since(self._recorded, round_number)
        ]
        if None in choices:
            return None
        return named.union(*(choice for choice in choices if choice is not None))

    def _named_in(self, round_number: int) -> dict[str, tuple[str, ...]]:
        if round_number not in self._named:
            while len(self._named) >= ROUNDS_REMEMBERED:
                del self._named[min(self._named)]
            self._named[round_number] = {}
        return self._named[round_number]
