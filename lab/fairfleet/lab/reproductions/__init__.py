"""Published tables that `fairfleet reproduce` runs again, by name or by letter."""

from __future__ import annotations

from fairfleet.common.errors import UsageError
from fairfleet.lab.reproductions.adafed_label_noise import LABEL_NOISE
from fairfleet.lab.reproductions.adafedadam_synthetic import SYNTHETIC
from fairfleet.lab.reproductions.base import Reproduction
from fairfleet.lab.reproductions.fedfv_table2 import TABLE_2
from fairfleet.lab.reproductions.fedfv_table3 import TABLE_3
from fairfleet.lab.reproductions.fedlf_table1 import TABLE_1
from fairfleet.lab.reproductions.fedmgda_adult import ADULT

__all__ = ["LETTERS", "REPRODUCTIONS", "Reproduction", "reproduction"]

REPRODUCTIONS: dict[str, Reproduction] = {
    table.name: table for table in (TABLE_2, TABLE_3, ADULT, SYNTHETIC, TABLE_1, LABEL_NOISE)
}
LETTERS = dict(zip("ABCDEF", REPRODUCTIONS.values(), strict=True))


def reproduction(name: str) -> Reproduction:
    """Return the reproduction with this name or letter. Raises UsageError if there is none."""
    match = REPRODUCTIONS.get(name) or LETTERS.get(name.upper())
    if match is None:
        choices = ", ".join(f"{letter} {table.name}" for letter, table in LETTERS.items())
        raise UsageError(f"there is no reproduction {name!r}; there are {choices}")
    return match
