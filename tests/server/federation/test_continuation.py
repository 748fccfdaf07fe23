"""A federation that goes on while its end is still being told is not disturbed by that."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from fairfleet.common.privacy import NO_TERMS
from fairfleet.common.reports import Evaluation
from fairfleet.server.federation.background import WORKERS
from fairfleet.server.federation.operators.continuation import ContinuationWish
from fairfleet.server.rounds.state_machine import Phase
from tests.support.coordinator_server import Server, serving


async def train(server: Server, number: int) -> None:
    """Deliver ann's update of a round, and return when ann is to evaluate the next version."""
    await server.until(lambda: server.coordinator.state.activity("ann") == "train")
    await server.send("ann", number)
    await server.until(lambda: server.coordinator.state.activity("ann") == "evaluate")


async def evaluate(server: Server, version: int, accuracy: float) -> None:
    session, evaluation = server.sessions["ann"].id, Evaluation(samples=1, accuracy=accuracy)
    report = server.coordinator.clients.report_evaluation
    await report(session, version, evaluation, "", NO_TERMS)


def test_a_result_that_is_loaded_slowly_takes_no_task_of_the_continued_federation(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        round_ = {"minimum_clients": 1, "evaluate_every": 1}
        async with serving(tmp_path, rounds=2, round=round_) as server:
            state, executors = server.coordinator.state, server.coordinator.runner.executors
            await server.join("ann")
            await train(server, 0)
            await evaluate(server, 1, 0.9)  # the best, which is loaded at the end
            await train(server, 1)
            free = threading.Event()
            busy = [executors.workers.submit(free.wait, 30) for _ in range(WORKERS)]
            try:
                await evaluate(server, 2, 0.1)
                assert state.round.phase is Phase.FINISHED
                await server.coordinator.continuation.go_on(ContinuationWish(rounds=3))
                assert state.activity("ann") == "train"
            finally:
                free.set()
            await asyncio.gather(*map(asyncio.wrap_future, busy))
            for _ in range(20):  # while the result is loaded, and what follows from it
                await asyncio.sleep(0.01)
                assert state.activity("ann") == "train"
            await train(server, 2)
            await evaluate(server, 3, 0.1)
            await server.until(lambda: state.result is not None)
            assert state.result is not None
            assert state.result.version == 1

    asyncio.run(scenario())
