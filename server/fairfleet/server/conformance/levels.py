"""The levels of a client, their checks, and the run of all of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.conformance import basic_checks as basic
from fairfleet.server.conformance import optional_checks as optional
from fairfleet.server.conformance.basic_checks import NotApplicable
from fairfleet.server.conformance.bench import Bench, base_settings
from fairfleet.server.conformance.observed_calls import CallLog, CheckFailed

Check = Callable[[Bench], Awaitable[None]]
Result = Literal["pass", "fail", "skipped"]
_PASS: Result = "pass"
_FAIL: Result = "fail"
_SKIPPED: Result = "skipped"
FOREVER = 10.0 * 365 * 24 * 3600


class Level(NamedTuple):
    """One level: its checks in order, and the settings of its server."""

    name: str
    checks: tuple[Check, ...]
    settings: dict[str, Any]
    joined: pb.JoinResponse  # changes of the answers to Join
    is_offered: Check | None = None  # without what it checks, the level is not begun


LEVELS = (
    Level(
        "basic",
        (
            basic.joins,
            basic.trains,
            basic.joins_a_single_sample,
            basic.evaluates,
            basic.continues_a_cut_download,
            basic.repeats_a_damaged_download,
            basic.continues_a_cut_upload,
            basic.repeats_a_damaged_upload,
            basic.keeps_requested_pauses,
            basic.joins_again,
            basic.survives_a_restart,
            basic.abandons_a_task,
        ),
        {"round": {"minimum_clients": 1, "evaluate_every": 1, "deadline_seconds": 3600.0}},
        pb.JoinResponse(),
    ),
    Level(
        "compressed",
        (
            optional.sends_int8,
            optional.feeds_errors_back,
            optional.keeps_errors_of_refused_updates,
        ),
        {"codec": "int8", "compression": {"error_feedback": True}},
        pb.JoinResponse(brings_models=True),
        optional.offers_int8,
    ),
    Level(
        "delta",
        (optional.applies_changes, optional.notices_a_wrong_change),
        {"compression": {"downlink": "int8", "model": "fp16"}},
        pb.JoinResponse(brings_models=True),
        optional.offers_int8,
    ),
    Level(
        "verify",
        (optional.measures_steps, optional.measures_the_initial_loss),
        {"verification": {"halvings": 2}},
        pb.JoinResponse(brings_models=True),
        optional.offers_verification,
    ),
    Level(
        "private",
        (optional.clips_updates, optional.adds_noise),
        {},
        pb.JoinResponse(brings_models=True, privacy=optional.PRIVACY),
        optional.offers_privacy,
    ),
)
# It ends the client, so it is the last check of a run.
LAST = basic.stops_after_aborted


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    level: str
    check: str  # in words
    result: Result
    reason: str = ""  # if it did not pass


def levels_named(names: Collection[str]) -> list[Level]:
    """Return the levels of these names, in order; all levels if there are none."""
    return [level for level in LEVELS if not names or level.name in names]


def words(check: Check) -> str:
    """Return what a check promises, for people."""
    return (check.__doc__ or check.__name__).strip().rstrip(".")


@dataclass
class ConformanceRun:
    """The check of one client: `ready` gets the address, and `done` each result."""

    bench: Bench
    ready: Callable[[str], None]
    done: Callable[[CheckResult], None]
    results: list[CheckResult] = field(default_factory=list)
    _has_joined: bool = False

    async def levels(self, levels: Collection[Level]) -> None:
        """Check every level, and at last that the client stops when it has to."""
        for level in levels:
            await self._level(level)
        if any(level.name == "basic" for level in levels):
            await self._check("basic", LAST)

    async def _level(self, level: Level) -> None:
        position = self.bench.log.position
        offers = (level.is_offered,) if level.is_offered else ()
        if self._has_joined and not all([await self._check(level.name, check) for check in offers]):
            return
        await self.bench.stop()
        await self.bench.start(level.settings, level.joined)
        if self._has_joined:
            begin: Check = _joins_the_level(position)
            if not await self._check(level.name, begin):
                return
        else:
            self.ready(self.bench.address)
            await self.bench.log.next("Join", position, "a client", seconds=FOREVER)
            self._has_joined = True
            if not all([await self._check(level.name, check) for check in offers]):
                return
        for check in level.checks:
            if not await self._check(level.name, check) and self.bench.log.is_silent:
                break  # every further check would wait in vain

    async def _check(self, level: str, check: Check) -> bool:
        """Do one check and record its result; return whether it did not fail."""
        result, reason = _PASS, ""
        try:
            await check(self.bench)
        except CheckFailed as error:
            result, reason = _FAIL, str(error)
        except NotApplicable as error:
            result, reason = _SKIPPED, str(error)
        self.bench.faults.disarm()
        self.results.append(CheckResult(level, words(check), result, reason))
        self.done(self.results[-1])
        return result != _FAIL


def _joins_the_level(position: int) -> Check:
    async def joins_again(bench: Bench) -> None:
        """A restart with other settings makes the client join again."""
        await bench.log.next("Join", position, "a Join at the restarted server")

    return joins_again


async def check_client(
    levels: Collection[Level],
    settings: dict[str, Any],
    patience_seconds: float,
    ready: Callable[[str], None],
    done: Callable[[CheckResult], None],
) -> list[CheckResult]:
    """Check the next client that joins in these levels, and return all results.

    `settings` are those of the server that differ from the usual ones, with `listen`. `ready` is
    called with the address once a client can join, and `done` after each check.
    """
    with tempfile.TemporaryDirectory(prefix="fairfleet-conformance-") as folder:
        bench = Bench(base_settings(Path(folder), **settings), CallLog(patience_seconds))
        run = ConformanceRun(bench, ready, done)
        checking = asyncio.create_task(run.levels(levels))
        restarting = asyncio.create_task(bench.restart_when_due())
        try:
            await asyncio.wait([checking, restarting], return_when=asyncio.FIRST_COMPLETED)
            if restarting.done():
                restarting.result()  # it ends only by an error
            await checking
        finally:
            for task in (checking, restarting):
                task.cancel()
            await bench.stop()
    return run.results
