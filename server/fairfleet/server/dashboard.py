"""The page that the server shows of itself, and what feeds it: its files, the state, changes as they happen, the
conflict map.

Read-only, and nothing is fetched from anywhere else: the page works where there is no internet.
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

from fairfleet.common.plain import plain
from fairfleet.common.tensors import Section
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.http_endpoint import Answer, Page, Request, Stream
from fairfleet.server.picture import Picture, finite
from fairfleet.server.rounds import Phase
from fairfleet.server.store import Store

TICK_SECONDS = 1.0  # changes that come within so little are sent together
ALIVE_SECONDS = 10.0  # without a change: a sign of life
NUMBER = re.compile(r"[0-9]{1,9}")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def read_assets() -> dict[str, Page]:
    """By path: every file of the page."""
    pages = {}
    for file in files("fairfleet.server").joinpath("page").iterdir():
        kind = TYPES[file.name.rpartition(".")[2]]
        pages[f"/page/{file.name}"] = Page(HTTPStatus.OK, file.read_bytes(), f"{kind}; charset=utf-8", SAFE)
    pages["/"] = pages["/page/index.html"]
    return pages


@dataclass(frozen=True)
class Tick:
    """What all viewers are told at one time, made once."""

    number: int
    status: dict[str, Any]
    messages: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by revision seen: the one told, and how


class Dashboard:
    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        self.picture = Picture()
        self._coordinator = coordinator
        self._store = store
        self._boot = secrets.token_hex(4)  # revisions of another run of the server mean nothing
        self._tick = Tick(-1, {})
        self.assets = read_assets()  # there from the first moment: the page waits for the rest by itself

    async def answer(self, request: Request) -> Answer | None:
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
        said, status = 0.0, dict[str, Any]()
        while not self._coordinator.stopping:
            tick = self._now()
            if tick.status != status or self.picture.revision > seen:
                seen, message = self._told(tick, seen)
                status, said = tick.status, time.monotonic()
                yield message
            elif time.monotonic() - said > ALIVE_SECONDS:
                said = time.monotonic()
                yield b": alive\n\n"
            await asyncio.sleep(TICK_SECONDS - time.monotonic() % TICK_SECONDS)  # all viewers wake together

    def _now(self) -> Tick:
        number = int(time.monotonic() / TICK_SECONDS)
        if self._tick.number != number:
            self._tick = Tick(number, self._status())
        return self._tick

    def _told(self, tick: Tick, seen: int) -> tuple[int, bytes]:
        if seen not in tick.messages:
            message = self._message(seen, tick.status)
            tick.messages[seen] = self.picture.revision, message
        return tick.messages[seen]

    def _message(self, seen: int, status: dict[str, Any]) -> bytes:
        changes = {**self._since(seen), "status": status}
        return f"id: {self._boot}-{self.picture.revision}\ndata: {json.dumps(changes)}\n\n".encode()

    def _since(self, revision: int) -> dict[str, Any]:
        return {"boot": self._boot, "now": time.time(), "whole": revision == 0, **self.picture.since(revision)}

    def _seen(self, last_event_id: str | None) -> int:
        """What a viewer that was cut off has seen already: nothing, if that was of another run."""
        boot, _, revision = (last_event_id or "").partition("-")
        return int(revision) if boot == self._boot and revision.isdecimal() else 0

    def _status(self) -> dict[str, Any]:
        coordinator, round = self._coordinator, self._coordinator.round
        connected = {session.client for session in coordinator.sessions.all()}
        self.picture.compare(connected, coordinator.revoked, finished=round.phase is Phase.FINISHED)
        return {
            "federation": coordinator.settings.name,
            "listen": coordinator.settings.listen,
            "rule": coordinator.recipe.name,
            "parameters": coordinator.signature.size(Section.PARAMETERS),
            "version": coordinator.publication.version,
            "rounds_planned": coordinator.settings.rounds,
            "evaluate_every": coordinator.settings.round.evaluate_every,
            "phase": round.phase.value,
            "attempt": round.attempt,
            "paused": round.paused,
            "ended": round.stopping,
            "connected": len(coordinator.sessions),
            "missing": coordinator.missing_clients(),
            "asked": len(round.asked),
            "received": len(round.received),
            "lost": len(round.lost),
            "history_rows": len(coordinator.past_rows()),
            "bytes_received": coordinator.traffic.received_bytes,
            "bytes_sent": coordinator.traffic.sent_bytes,
            "privacy": plain(coordinator.spending.status()) if coordinator.spending else None,
        }

    # ---- the conflict map ----------------------------------------------------------------------

    async def _conflicts(self, layer_text: str | None) -> Page:
        """Of the newest round; inside one layer, if its number is given."""
        if layer_text is not None and not NUMBER.fullmatch(layer_text):
            return _json({"error": "layer must be a number from 0; leave it out for all"}, HTTPStatus.BAD_REQUEST)
        layer = int(layer_text) if layer_text else None
        layers = [tensor.name for tensor, _ in self._coordinator.signature.spans(Section.PARAMETERS) if tensor.size]
        found = self._coordinator.conflict_map
        if found is None:
            return _json({"layers": [], "harmed": [], **await asyncio.to_thread(self._recorded)})
        if layer is not None and layer >= len(layers):
            return _json({"error": f"layer {layer} is not one of the {len(layers)} from 0"}, HTTPStatus.NOT_FOUND)
        return _json(
            {
                "round": found.round,
                "layers": layers,
                "harmed": found.disagreement(),
                "layer": layer,
                "clients": list(found.clients),
                "conflicting": found.conflicting(layer),
                "cosines": found.cosines(layer).round(3).tolist(),
                "direction": [finite(round(float(cosine), 3)) for cosine in found.with_direction(layer)],
            }
        )

    def _recorded(self) -> dict[str, Any]:
        """From the database: of an earlier run of the server, or of a round too large for the map."""
        newest = self._coordinator.publication.version - 1
        records = self._store.records(newest, newest)
        if not records:
            return {"round": None, "clients": [], "conflicting": 0, "cosines": [], "direction": []}
        told = records[0]["diagnostics"]
        clients = [contribution["client"] for contribution in records[0]["contributions"]]
        return {
            "round": newest,
            "clients": clients,
            "conflicting": len(told["conflicts"]),
            "cosines": [[round(cosine, 3) for cosine in line] for line in told["client_cosines"]],
            "direction": [round(told["cosines"].get(client, 0.0), 3) for client in clients],
        }


def _json(value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Page:
    return Page(status, json.dumps(value).encode(), "application/json", SAFE)
