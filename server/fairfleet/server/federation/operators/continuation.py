"""Lets a finished federation go on, from its newest version or from an earlier one.

Everything is one transaction: the limits, the way back, and the record of who asked. After it, an
earlier version is loaded as at a start of the server, so a crash in between changes nothing. What
was spent of a privacy budget stays spent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from fairfleet.common.errors import BadRequest, FleetError, NotKept, StateDirError, WrongState
from fairfleet.common.names import round_name
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.background import loop_time
from fairfleet.server.federation.round_commit import RoundCommits
from fairfleet.server.federation.round_opening import open_committer
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.rounds.limits import ContinuedLimits, Limits
from fairfleet.server.rounds.state_machine import Continued, Phase, Round
from fairfleet.server.rules import Recipe
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.files.checksummed_arrays import load_vectors
from fairfleet.server.storage.operations.progress import (
    continued_limits_write,
    counted_after_write,
)
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.store import Store, StoredModel
from fairfleet.server.transfer.published_model import PublishedModel

log = logging.getLogger(__name__)

WRITTEN_ANEW = ("fairfleet", "version")  # metadata that each file of a model has of its own


class ContinuationWish(NamedTuple):
    """How an operator wishes the federation to go on; None: as it is."""

    from_version: int | None = None
    rounds: int | None = None  # the new total
    seconds: float | None = None  # from now on


class Continuation:
    """Carries out `fairfleet continue`."""

    def __init__(
        self,
        runner: RoundRunner,
        commits: RoundCommits,
        settings: ServerSettings,
        recipe: Recipe,
        begin_waiting: Callable[[], None],
    ) -> None:
        """`begin_waiting` restarts the time that the federation waits for too few clients."""
        self._runner, self._commits = runner, commits
        self._settings, self._recipe = settings, recipe
        self._begin_waiting = begin_waiting

    async def go_on(self, wish: ContinuationWish, *writes: Write) -> int:
        """Let the federation go on, and return the version from which it does.

        `writes` are part of the transaction. Raises WrongState if the federation is not finished or
        would finish again at once, and NotKept for a version whose model is not kept.
        """
        _check(wish)
        return await self._runner.background.run_to_completion(self._go_on(wish, writes))

    async def _go_on(self, wish: ContinuationWish, writes: tuple[Write, ...]) -> int:
        runner = self._runner
        async with runner.lock:
            before = runner.round
            _refuse_unfinished(before, wish)
            earlier = await self._earlier(before, wish.from_version)
            limits = self._limits(wish)
            version = before.number + (earlier is not None)
            await self._refuse_useless(version, earlier.version if earlier else version, limits)
            planned = ContinuedLimits(self._settings.limits_of_end(), limits)
            writes = (*writes, continued_limits_write(planned))
            if before.phase is Phase.FINISHED:
                writes = (*writes, counted_after_write(before.number))
            copy = None
            if earlier is not None:
                copy = await runner.executors.in_worker(
                    copy_version, runner.store, earlier, version
                )
            try:
                await self._resume(before, limits, copy, earlier, writes)
            except Exception as error:
                runner.background.fail(error)  # memory may differ from the database
                raise
            return version

    async def _earlier(self, round_: Round, version: int | None) -> StoredModel | None:
        """Return the version to go back to; None for the newest. Raises NotKept."""
        if version is None or version == round_.number:
            return None
        runner, stored = self._runner, None
        if version < round_.number:
            stored = await runner.executors.in_database(runner.store.model, version)
        if stored is None:
            raise NotKept(
                f"version {version} is not kept; the newest is {round_.number}, and "
                "`fairfleet models` lists the versions that can be gone back to"
            )
        return stored

    def _limits(self, wish: ContinuationWish) -> Limits:
        limits, clock = self._runner.limits, self._runner.clock
        seconds = limits.seconds if wish.seconds is None else clock.seconds() + wish.seconds
        return Limits(limits.rounds if wish.rounds is None else wish.rounds, seconds)

    async def _refuse_useless(self, version: int, scored_version: int, limits: Limits) -> None:
        """Raise WrongState if the federation would finish again at once."""
        runner, again = self._runner, "the federation would finish again at once: "
        if version >= limits.rounds:
            raise WrongState(
                f"{again}it would continue at version {version}, and {limits.rounds} rounds are "
                f"planned. Give --rounds with more than {version}."
            )
        elapsed = runner.clock.seconds()
        if reason := runner.scheduler.still_reached(scored_version, limits.seconds, elapsed):
            raise WrongState(
                f"{again}{reason}. Give --seconds for more time; for a target, change "
                "end.worst_10_percent in the settings and restart the server."
            )
        if reason := await runner.exhausted_budget(runner.sessions.all()):
            raise WrongState(
                f"{again}{reason}. Change privacy.max_epsilon in the settings and restart the "
                "server."
            )

    async def _resume(
        self,
        before: Round,
        limits: Limits,
        copy: StoredModel | None,
        earlier: StoredModel | None,
        writes: tuple[Write, ...],
    ) -> None:
        """Make the continuation durable, then visible; then let the next round begin."""
        runner = self._runner
        runner.drained.clear()
        runner.clock.run()
        runner.training_times.begin(loop_time())
        self._begin_waiting()
        if before.phase is Phase.FINISHED:
            runner.scheduler.count_evaluations_after(before.number)
        runner.limit(limits)
        if copy is None or earlier is None:
            event = Continued(before.number)
            announced = {"federation_continued": self._message(before.number)}
            log.info("federation continues at version %d", before.number)
            await runner.apply(event, writes=writes, announcements=[announced])
            return
        event = Continued(copy.version, earlier.version)
        await self._commits.commit_again(copy, earlier.version, event, *writes)
        await self._load(copy.version)
        log.info(
            "federation continues at version %d, which has the model of version %d",
            copy.version,
            earlier.version,
        )
        runner.emit(federation_continued=self._message(copy.version))
        await runner.apply()

    async def _load(self, version: int) -> None:
        """Load what the state directory now holds, as at a start of the server."""
        runner = self._runner
        await open_committer(runner, self._settings, self._recipe, version)
        await runner.executors.in_database(runner.scheduler.recall, runner.store)
        runner.upload_registry.clear(version, lambda client, number: False)
        runner.round = await runner.executors.in_database(runner.store.current_round)
        await self._commits.open(version)

    def _message(self, version: int) -> pb.FederationContinued:
        planned = self._runner.policy.rounds
        return pb.FederationContinued(version=version, rounds_planned=planned)


def copy_version(store: Store, earlier: StoredModel, version: int) -> StoredModel:
    """Write the files of an earlier version once more, as those of a new one.

    Raises NotKept if they are damaged.
    """
    try:
        model, metadata = Model.load(store.folder / earlier.file)
        if PublishedModel.of(earlier.version, model).digest != earlier.digest:
            raise StateDirError(f"{earlier.file} does not have the digest in the database")
        vectors = load_vectors(store.folder / earlier.vectors_file) if earlier.vectors_file else {}
    except (FleetError, ValueError) as error:
        raise NotKept(f"version {earlier.version} cannot be gone back to: {error}") from error
    kept = {name: value for name, value in metadata.items() if name not in WRITTEN_ANEW}
    return StoredModel(
        version,
        earlier.digest,
        store.files.write_model(version, model, kept),
        earlier.rule_state,
        store.files.write_vectors(version, vectors),
    )


def _check(wish: ContinuationWish) -> None:
    """Raise BadRequest for limits that are impossible whatever the federation's state."""
    if wish.rounds is not None and wish.rounds < 1:
        raise BadRequest(f"found {wish.rounds} as the new number of rounds; give at least 1")
    if wish.seconds is not None and not (math.isfinite(wish.seconds) and wish.seconds > 0):
        raise BadRequest(f"found {wish.seconds:g} more seconds; give a positive number")


def _refuse_unfinished(round_: Round, wish: ContinuationWish) -> None:
    """Raise WrongState for a federation that goes on anyway, or has not finished yet."""
    if round_.phase is Phase.FINISHED:
        return
    if not round_.stopping:
        raise WrongState(
            f"the federation is not finished: {round_name(round_.number)} is {round_.phase.value}. "
            "There is nothing to continue; `fairfleet stop` would end it after this round."
        )
    if wish.from_version is not None:
        raise WrongState(
            f"the federation finishes after {round_name(round_.number)}, which is "
            f"{round_.phase.value}; an earlier version can be gone back to when it has finished"
        )
