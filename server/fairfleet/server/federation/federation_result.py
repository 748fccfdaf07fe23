"""The federation's result: the model that participants may fetch once it is finished.

It is the best evaluated version that is kept, else the newest. It is loaded before any client
learns of the end, and stays published until the last session is over.
"""

from __future__ import annotations

import logging

from fairfleet.common.errors import StateDirError
from fairfleet.server.aggregation.stored_state import read_model
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.transfer.published_model import PublishedModel

log = logging.getLogger(__name__)


async def publish_result(runner: RoundRunner) -> None:
    """Publish the result, then let clients that wait for a task learn of the end."""
    end, newest, best = runner.round, runner.committer.publication, runner.best_version
    result = newest
    if best is not None and best != newest.version:
        try:
            result = await runner.executors.in_worker(load_publication, runner, best)
        except StateDirError as error:
            log.error("participants get version %d as the result: %s", newest.version, error)
    if runner.round != end:
        return  # the federation goes on: clients may have tasks by now
    log.info("the result of the federation is version %d", result.version)
    runner.publish_result(result)
    runner.assignments.release_all()
    runner.check_drained()


def load_publication(runner: RoundRunner, version: int) -> PublishedModel:
    """Return a kept version as clients receive it; raise StateDirError if it is not there."""
    stored = runner.store.model(version)
    if stored is None:
        raise StateDirError(f"{runner.store.folder} has no model of version {version}")
    model = read_model(runner.store.folder / stored.file)
    publication = PublishedModel.of(version, model, runner.committer.downlink.steady)
    if publication.digest != stored.digest:
        raise StateDirError(f"{runner.store.folder / stored.file} is damaged: its digest differs")
    return publication
