"""Published tables that `fairfleet reproduce` runs again, by name; the letters are short for them."""

from __future__ import annotations

from fairfleet.common.errors import UsageError
from fairfleet.lab.reproductions.adafedadam_synthetic import SYNTHETIC
from fairfleet.lab.reproductions.base import Reproduction
from fairfleet.lab.reproductions.fedfv_table2 import TABLE_2
from fairfleet.lab.reproductions.fedfv_table3 import TABLE_3
from fairfleet.lab.reproductions.fedlf_table1 import TABLE_1
from fairfleet.lab.reproductions.fedmgda_adult import ADULT

REPRODUCTIONS: dict[str, Reproduction] = {one.name: one for one in (TABLE_2, TABLE_3, ADULT, SYNTHETIC, TABLE_1)}
LETTERS = dict(zip("ABCDE", REPRODUCTIONS.values(), strict=True))


def reproduction(name: str) -> Reproduction:
    found = REPRODUCTIONS.get(name) or LETTERS.get(name.upper())
    if found is None:
        known = ", ".join(f"{letter} {one.name}" for letter, one in LETTERS.items())
        raise UsageError(f"no reproduction {name!r}; there are {known}")
    return found
