"""A federation keeps the defaults of its rule with which it began.

The default of FedLF's layers was tensors before it became modules. AdaFedAdam divided losses by
those at a client's first participation before it took those on the initial model. A state directory
that was begun with the former default, or before there was a choice, goes on with it unless the
setting is given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

import sqlalchemy as sa

from fairfleet.server.rounds.state_machine import Round
from fairfleet.server.rules import Blocks, Recipe
from fairfleet.server.storage.queries import writing
from fairfleet.server.storage.schema import meta
from fairfleet.server.storage.store import Store

KEY = "rule_blocks"  # in the table `meta`
FIRST_LOSSES = "rule_first_losses"  # in the table `meta`: what first losses are, one of these two:
INITIAL, AT_FIRST = "initial", "first"  # on the initial model, or at the first participation
BEFORE: Literal["tensors"] = "tensors"  # in state directories that are older than the choice


def with_kept_defaults(store: Store, recipe: Recipe) -> Recipe:
    """Return the recipe with the defaults of this state directory, and store them."""
    return _with_kept_first_losses(store, with_kept_blocks(store, recipe))


def _with_kept_first_losses(store: Store, recipe: Recipe) -> Recipe:
    """Return the recipe with what first losses are in this state directory, and store it.

    Rules that do not read first losses change nothing.
    """
    if "first_loss" not in recipe.rule.needs().reports:
        return recipe
    recorded = _recorded(store, FIRST_LOSSES)
    begun = recorded or (AT_FIRST if store.current_round() != Round(0) else None)
    if begun == AT_FIRST:
        recipe = replace(recipe, rule=recipe.rule.keeping_first_losses())
    used = INITIAL if recipe.rule.needs().initial_loss else AT_FIRST
    if used != recorded:
        _record(store, FIRST_LOSSES, used)
    return recipe


def with_kept_blocks(store: Store, recipe: Recipe) -> Recipe:
    """Return the recipe with the blocks of this state directory, and store them.

    Rules that do not read layers change nothing.
    """
    if not recipe.rule.needs().layers:
        return recipe
    recorded = recorded_blocks(store)
    begun = recorded or (BEFORE if store.current_round() != Round(0) else None)
    if begun:
        recipe = replace(recipe, rule=recipe.rule.keeping_blocks(begun))
    if (blocks := recipe.rule.blocks()) != recorded:
        _record(store, KEY, blocks)
    return recipe


def recorded_blocks(store: Store) -> Blocks | None:
    """Return the blocks that the state directory records, if any."""
    return cast(Blocks | None, _recorded(store, KEY))


def _recorded(store: Store, key: str) -> str | None:
    rows = store.rows(sa.select(meta.c.value).where(meta.c.key == key))
    return str(rows[0].value) if rows else None


def _record(store: Store, key: str, value: str) -> None:
    store.write(
        writing(meta.delete().where(meta.c.key == key)),
        writing(meta.insert(), {"key": key, "value": value}),
    )
