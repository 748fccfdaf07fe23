"""Privacy accounting is slow: the server answers meanwhile, and computes nothing twice."""

from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.monitoring.http_endpoint import Page, Request
from fairfleet.server.monitoring.monitor import Monitor
from fairfleet.server.privacy import accountant as accounting
from fairfleet.server.privacy.accountant import SampledRelease
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.store import Store
from tests.support.coordinator_server import Server, SlowStore, serving, start_waiting

SETTINGS: dict[str, Any] = {
    "rule": {"name": "fedavg", "weighting": "uniform"},
    "round": {"clients": 1, "minimum_clients": 3, "evaluate_every": 0},
    "privacy": {
        "where": "server",
        "clip": 1.0,
        "noise_multiplier": 4.0,
        "amplification": True,
        "max_epsilon": 90.0,
    },
}
DRAW = SampledRelease(2.0, 1, 3)


class SlowAccountant:
    """The real accountant, which waits for `free` and records in which threads it computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.computed: list[SampledRelease] = []
        self.threads: set[threading.Thread] = set()
        self._real = accounting._compute
        monkeypatch.setattr(accounting, "_cached", {})  # as in a new process
        monkeypatch.setattr(accounting, "_compute", self._compute)

    def _compute(self, draw: SampledRelease) -> np.ndarray:
        self.computed.append(draw)
        self.threads.add(threading.current_thread())
        self.begun.set()
        assert self.free.wait(30) or threading.current_thread() is threading.main_thread()
        return self._real(draw)


async def health(server: Server) -> HTTPStatus:
    """Return the status of the health page."""
    page = await Monitor(server.coordinator.state, server.store).answer(Request("/healthz"))
    assert isinstance(page, Page)
    return page.status


async def one_round(server: Server) -> None:
    """Complete one round with the selected client."""
    number = server.coordinator.state.round.number
    await server.until(lambda: len(server.coordinator.state.round.asked) == 1)
    (client,) = server.coordinator.state.round.asked
    await server.send(client, number)
    await server.until(lambda: server.coordinator.state.publication.version == number + 1)


def test_the_server_answers_while_epsilon_is_computed_and_a_restart_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accountant, spent = SlowAccountant(monkeypatch), list[float]()

    async def first_run() -> None:
        async with serving(tmp_path / "s", **SETTINGS) as server:
            await server.join("a", "b")
            # The round must not begin before its cost is known.
            joining = await start_waiting(server.join("c"))
            assert await asyncio.to_thread(accountant.begun.wait, 30)
            assert await health(server) is HTTPStatus.OK
            accountant.free.set()
            await joining
            await one_round(server)
            assert server.coordinator.state.privacy_budget is not None
            spent.append(server.coordinator.state.privacy_budget.epsilon())

    async def second_run() -> None:
        store = SlowStore(tmp_path / "s")
        coordinator = Coordinator(
            store, ServerSettings.model_validate({"rounds": 1000, **SETTINGS})
        )
        await coordinator.start()
        server = Server(coordinator, store)
        await server.join("a", "b", "c")
        assert coordinator.state.privacy_budget is not None
        spent.append(coordinator.state.privacy_budget.epsilon())
        await one_round(server)
        await coordinator.stop()
        store.close()

    asyncio.run(first_run())
    assert accountant.computed == [DRAW]
    assert threading.main_thread() not in accountant.threads
    accounting._cached.clear()
    asyncio.run(second_run())
    assert accountant.computed == [DRAW]
    assert spent[0] == spent[1] > 0


def test_a_state_directory_without_stored_results_is_accounted_for_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous version wrote such directories."""
    accountant = SlowAccountant(monkeypatch)
    accountant.free.set()

    async def first_run() -> None:
        async with serving(tmp_path / "s", **SETTINGS) as server:
            await server.join("a", "b", "c")
            await one_round(server)

    async def second_run() -> None:
        store = SlowStore(tmp_path / "s")
        coordinator = Coordinator(
            store, ServerSettings.model_validate({"rounds": 1000, **SETTINGS})
        )
        server = Server(coordinator, store)
        starting = await start_waiting(coordinator.start())
        assert await asyncio.to_thread(accountant.begun.wait, 30)
        assert await health(server) is HTTPStatus.OK
        accountant.free.set()
        await starting
        await coordinator.stop()
        store.close()

    asyncio.run(first_run())
    store = Store(tmp_path / "s")
    store.write(lambda connection: connection.exec_driver_sql("drop table divergences"))
    store.close()
    accounting._cached.clear()
    accountant.free.clear()
    accountant.begun.clear()
    asyncio.run(second_run())
    assert threading.main_thread() not in accountant.threads
