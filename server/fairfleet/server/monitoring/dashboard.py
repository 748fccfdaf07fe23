"""The dashboard: the files of its page, its state, a stream of changes, and the conflict map.

The dashboard is read-only. Its page loads nothing from other hosts, so it works without internet.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fairfleet.common.cli.message_json import plain
from fairfleet.common.features import software
from fairfleet.common.tensors import Section
from fairfleet.server.aggregation.conflict_map import ConflictMap
from fairfleet.server.aggregation.staging import layer_names
from fairfleet.server.federation.federation_state import FederationState
from fairfleet.server.monitoring.dashboard_state import DashboardState, finite
from fairfleet.server.monitoring.http_endpoint import Answer, Page, Request, Stream
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.storage.store import Store

TICK_SECONDS = 1.0  # changes within one tick are sent together
ALIVE_SECONDS = 10.0  # after this time without a change, a sign of life is sent
NUMBER = re.compile(r"[0-9]{1,9}")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def read_assets() -> dict[str, Page]:
    """Return every file of the page, by path."""
    pages = {}
    for file in files("fairfleet.server.monitoring").joinpath("page").iterdir():
        kind = TYPES[file.name.rpartition(".")[2]]
        pages[f"/page/{file.name}"] = Page(
            HTTPStatus.OK, file.read_bytes(), f"{kind}; charset=utf-8", SAFE
        )
    pages["/"] = pages["/page/index.html"]
    return pages


@dataclass(frozen=True)
class Tick:
    """The messages of one tick; all viewers share them."""

    number: int
    status: dict[str, Any]
    # By the revision that a viewer has seen: the revision it has seen then, and the message.
    messages: dict[int, tuple[int, bytes]] = field(default_factory=dict)


class Dashboard:
    """Answers the requests of the dashboard's page."""

    def __init__(self, federation: FederationState, store: Store) -> None:
        self.state = DashboardState()
        self._federation = federation
        self._store = store
        self._boot = secrets.token_hex(4)  # tells this run's revisions from those of others
        self._tick = Tick(-1, {})
        self.assets = read_assets()

    async def answer(self, request: Request) -> Answer | None:
        """Return the answer of the API to a request; None for another path."""
        match request.path:
            case "/api/state":
                return _json({"status": self._status(), **self._since(0)})
            case "/api/live":
                return Stream(self._live(self._seen(request.headers.get("last-event-id"))))
            case "/api/conflicts":
                return await self._conflicts(request.query.get("layer"))
        return None

    # ---- changes -------------------------------------------------------------------------------

    async def _live(self, seen: int) -> AsyncGenerator[bytes]:
        """Yield a message after each tick with changes since revision `seen`."""
        sent_at, status = 0.0, dict[str, Any]()
        while not self._federation.stopping:
            tick = self._current_tick()
            if tick.status != status or self.state.revision > seen:
                seen, message = self._shared_message(tick, seen)
                status, sent_at = tick.status, time.monotonic()
                yield message
            elif time.monotonic() - sent_at > ALIVE_SECONDS:
                sent_at = time.monotonic()
                yield b": alive\n\n"
            # All viewers wake at the same time, so they share the messages of a tick.
            await asyncio.sleep(TICK_SECONDS - time.monotonic() % TICK_SECONDS)

    def _current_tick(self) -> Tick:
        number = int(time.monotonic() / TICK_SECONDS)
        if self._tick.number != number:
            self._tick = Tick(number, self._status())
        return self._tick

    def _shared_message(self, tick: Tick, seen: int) -> tuple[int, bytes]:
        if seen not in tick.messages:
            message = self._message(seen, tick.status)
            tick.messages[seen] = self.state.revision, message
        return tick.messages[seen]

    def _message(self, seen: int, status: dict[str, Any]) -> bytes:
        changes = {**self._since(seen), "status": status}
        return f"id: {self._boot}-{self.state.revision}\ndata: {json.dumps(changes)}\n\n".encode()

    def _since(self, revision: int) -> dict[str, Any]:
        return {
            "boot": self._boot,
            "now": time.time(),
            **self.state.since(revision),
        }

    def _seen(self, last_event_id: str | None) -> int:
        """Return the revision that a reconnecting viewer has seen; 0 if of another run."""
        boot, _, revision = (last_event_id or "").partition("-")
        return int(revision) if boot == self._boot and revision.isdecimal() else 0

    def _status(self) -> dict[str, Any]:
        federation, round_number = self._federation, self._federation.round
        sessions = federation.sessions()
        connected = {session.client for session in sessions}
        self.state.compare(
            connected,
            federation.revoked,
            {**dict.fromkeys(federation.exhausted, ""), **federation.retired},
            finished=round_number.phase is Phase.FINISHED,
        )
        for session in sessions:
            obstacle, member = federation.not_selected_because(session), session.member
            self.state.describe(session.client, member.software, member.train_samples, obstacle)
        return {
            "federation": federation.settings.name,
            "federation_id": federation.federation_id,
            "software": software(),
            "listen": federation.settings.listen,
            "rule": federation.recipe.name,
            "parameters": federation.signature.size(Section.PARAMETERS),
            "version": federation.publication.version,
            "rounds_planned": federation.rounds_planned,
            "evaluate_every": federation.settings.round.evaluate_every,
            "phase": round_number.phase.value,
            "attempt": round_number.attempt,
            "paused": round_number.paused or bool(federation.held_because),
            "held_because": federation.held_because,
            "measure": federation.measure,
            "ended": round_number.stopping,
            "connected": federation.connected,
            "missing": federation.missing_clients(),
            "asked": len(round_number.asked),
            "received": len(round_number.received),
            "lost": len(round_number.lost),
            "history_rows": len(federation.past_rows()),
            "bytes_received": federation.traffic.received_bytes,
            "bytes_sent": federation.traffic.sent_bytes,
            "privacy": plain(federation.privacy_budget.status())
            if federation.privacy_budget
            else None,
        }

    # ---- the conflict map ----------------------------------------------------------------------

    async def _conflicts(self, layer_text: str | None) -> Page:
        """Return the conflicts of the newest round, in all layers or in the layer of a number."""
        if layer_text is not None and not NUMBER.fullmatch(layer_text):
            error = "layer must be a number from 0; leave it out for all"
            return _json({"error": error}, HTTPStatus.BAD_REQUEST)
        layer = int(layer_text) if layer_text else None
        conflict_map = self._federation.conflict_map
        if conflict_map is None:
            return _json({"layers": [], "harmed": [], **await asyncio.to_thread(self._recorded)})
        blocks = self._federation.recipe.rule.blocks()
        layers = layer_names(self._federation.signature, blocks)
        if layer is not None and layer >= len(layers):
            error = f"layer {layer} is not one of the {len(layers)} from 0"
            return _json({"error": error}, HTTPStatus.NOT_FOUND)
        return _json(_conflicts_in(conflict_map, layers, layer))

    def _recorded(self) -> dict[str, Any]:
        """Return the conflicts that the record of the newest round has.

        The map is not in memory after a restart, or if the round was too large for it.
        """
        newest = self._federation.publication.version - 1
        records = self._store.records(newest, newest)
        if not records:
            return {"round": None, "clients": [], "conflicting": 0, "cosines": [], "direction": []}
        diagnostics = records[0].diagnostics
        clients = [contribution.client for contribution in records[0].contributions]
        conflicts, cosines = diagnostics.get("conflicts"), diagnostics["cosines"]
        matrix = diagnostics.get("client_cosines") or ()
        directions = [] if conflicts is None else [cosines.get(client, 0.0) for client in clients]
        return {
            "round": newest,
            "diagnostics": diagnostics.get("level"),
            "clients": clients,
            "conflicting": None if conflicts is None else len(conflicts),  # None: not computed
            "cosines": [[round(cosine, 3) for cosine in row] for row in matrix],
            "direction": [round(cosine, 3) for cosine in directions],
        }


def _conflicts_in(
    conflict_map: ConflictMap, layers: list[str], layer: int | None
) -> dict[str, Any]:
    """Return the conflicts in one layer; in the whole model if it is None."""
    directions = conflict_map.with_direction(layer)
    return {
        "round": conflict_map.round,
        "diagnostics": "full",
        "layers": layers,
        "harmed": conflict_map.disagreement(),
        "layer": layer,
        "clients": list(conflict_map.clients),
        "conflicting": conflict_map.conflicting(layer),
        "cosines": conflict_map.cosines(layer).round(3).tolist(),
        "direction": [finite(round(float(cosine), 3)) for cosine in directions],
    }


def _json(value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Page:
    return Page(status, json.dumps(value).encode(), "application/json", SAFE)
