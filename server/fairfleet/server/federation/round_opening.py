"""Resumes the round where the state directory left it."""

from __future__ import annotations

import json
import logging

from fairfleet.common.errors import StateDirError, short
from fairfleet.common.features import software
from fairfleet.common.names import round_name
from fairfleet.server.federation.federation_result import load_publication
from fairfleet.server.federation.model_committer import CommitterOptions, ModelCommitter
from fairfleet.server.federation.operators.effective_settings import settings_digest
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.rules import Recipe
from fairfleet.server.rules.optimizers import OPTIMIZERS
from fairfleet.server.settings import ServerSettings, plan_for_rule
from fairfleet.server.storage.store import Fact, Store, StoredUpdate
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.published_model import PublishedModel

log = logging.getLogger(__name__)

Resumption = tuple[dict[str, StoredUpdate], tuple[state_machine.Action, ...]]


async def open_round(runner: RoundRunner, settings: ServerSettings, recipe: Recipe) -> Resumption:
    """Load the stored round into the runner; return its durable updates and the next actions."""
    await runner.compute_divergences()
    stored, store = await _stored_round(runner), runner.store
    await open_committer(runner, settings, recipe, stored.number)
    if recipe.rule.needs().initial_loss:
        runner.initial_model = await runner.executors.in_worker(_initial_model, runner, recipe)
    stored_updates = store.updates_of(stored.number)
    updates = {update.client: update for update in stored_updates if update.file}
    await _delete_unneeded_files(runner, stored.number, updates)
    runner.round, actions = state_machine.resume(stored, runner.policy, frozenset(updates))
    _log_start(store, runner.round, settings)
    return updates, actions


def _initial_model(runner: RoundRunner, recipe: Recipe) -> PublishedModel:
    """Load version 0, on which clients measure the losses that the rule divides by."""
    try:
        return load_publication(runner, 0)
    except StateDirError as error:
        raise StateDirError(
            f"{error}. Rule {recipe.name!r} needs the loss of clients on it. Restore the file from "
            "a backup; or set rule.reference=first or rule.reference=none, which do not need it."
        ) from error


def _log_start(store: Store, round_: Round, settings: ServerSettings) -> None:
    """Log where the federation goes on, or that it is over and how to go on."""
    if round_.phase is not Phase.FINISHED:
        log.info(
            "%s: %s is %s with %d updates",
            store.federation,
            round_name(round_.number),
            round_.phase.value,
            len(round_.received),
        )
        return
    log.warning(
        "the federation in %s has finished at version %d (%s): no more rounds are trained. To go "
        "on, run `fairfleet continue --rounds N` with N above %d while this server runs; to begin "
        "a new federation, give another --state-dir.",
        settings.state_dir,
        round_.number,
        round_.stopping,
        round_.number,
    )


async def open_committer(
    runner: RoundRunner, settings: ServerSettings, recipe: Recipe, version: int
) -> None:
    """Load a committed version, and what belongs to it, into the runner."""
    options = _committer_options(settings, recipe, runner.prediction_bases)
    runner.committer = await runner.executors.in_worker(
        ModelCommitter.open, runner.store, version, recipe, options
    )


def _committer_options(
    settings: ServerSettings, recipe: Recipe, bases: PredictionBases | None
) -> CommitterOptions:
    compression, privacy = settings.compression, settings.privacy
    return CommitterOptions(
        history=settings.history,
        codec=compression.downlink,
        changes=compression.changes,
        model_codec=compression.model,
        admission=settings.admission,
        noise=privacy.server_noise(settings.cohort) if privacy else None,
        bases=bases,
        diagnostics=settings.diagnostics,
        measurement=settings.needed_measurement,
        rule_loss=settings.losses.rule,
        metadata=_model_metadata(settings, recipe),
    )


def _model_metadata(settings: ServerSettings, recipe: Recipe) -> dict[str, str]:
    """Return what the file of a model says about how it was made."""
    optimizers = {kind: name for name, kind in OPTIMIZERS.items()}
    optimizer = optimizers.get(type(recipe.optimizer), type(recipe.optimizer).__name__)
    return {
        "rule": json.dumps({"name": recipe.name, **recipe.rule.model_dump(mode="json")}),
        "optimizer": json.dumps({"name": optimizer, **recipe.optimizer.model_dump(mode="json")}),
        "plan": plan_for_rule(settings.plan, recipe).model_dump_json(),
        "settings_digest": settings_digest(settings).hex(),
        "software": software(),
    }


async def _delete_unneeded_files(
    runner: RoundRunner, round_number: int, updates: dict[str, StoredUpdate]
) -> None:
    """Delete the files of the state directory that nothing names, or nothing needs any more."""
    executors, store = runner.executors, runner.store
    # Without delta coding, only the bases of this round's updates are still read.
    bases = {update.base for update in updates.values() if update.base}
    needed = None if runner.prediction_bases else bases
    await executors.in_worker(runner.upload_registry.bases.clear_away, needed)
    named = await executors.in_database(store.named_files)
    await executors.in_worker(store.files.delete_unnamed, named, round_number)


async def _stored_round(runner: RoundRunner) -> Round:
    """Return the stored round without clients that were revoked.

    An earlier run may have stopped before it removed them, or may not have known revocations.
    """
    stored, facts = runner.store.current_round(), list[Fact]()
    is_collecting = stored.phase in (Phase.WAITING, Phase.TRAINING)
    removed = list[str]()
    for client in sorted(runner.revoked):
        event = state_machine.ClientRevoked(client)
        after, _ = state_machine.step(stored, event, runner.policy)
        if after != stored:
            facts.append((stored, event, after))
            removed.append(client)
            stored = after
    if removed:
        withdrawn = removed if is_collecting else ()
        writes = [runner.store.withdrawal_write(client, stored.number) for client in withdrawn]
        await runner.executors.in_database(runner.store.record, facts, stored, *writes)
        names = short(", ".join(removed), 200)
        log.warning("%s continues without revoked clients: %s", round_name(stored.number), names)
    return stored
