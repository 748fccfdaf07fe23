"""A federation keeps the blocks in which its rule began to see the model.

The default of FedLF's layers was tensors before it became modules. A state directory that was begun
with tensors, or before there was a choice, goes on with them unless the setting is given.
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
BEFORE: Literal["tensors"] = "tensors"  # in state directories that are older than the choice


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
        store.write(
            writing(meta.delete().where(meta.c.key == KEY)),
            writing(meta.insert(), {"key": KEY, "value": blocks}),
        )
    return recipe


def recorded_blocks(store: Store) -> Blocks | None:
    """Return the blocks that the state directory records, if any."""
    rows = store.rows(sa.select(meta.c.value).where(meta.c.key == KEY))
    return cast(Blocks, rows[0].value) if rows else None
