"""Rows of the history in float16, each scaled by a power of two against overflow and underflow.

A row whose largest magnitude lies between SMALLEST and LARGEST is stored unscaled, with exponent 0.
Any other row is divided by the power of two that brings its largest magnitude between 2^14 and
2^15. For every row of finite float32 values, the rounding error is then at most 2^-11 of the value
plus 2^-17 of the row's largest magnitude.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fairfleet.server.gram.blocks import Row

LARGEST = 65504.0  # the largest float16
# From this magnitude on, values down to 1/64 of the largest are at least 2^-14, the smallest normal
# number of float16.
SMALLEST = 2.0**-8
TOP = 15  # the largest magnitude of a scaled row is below 2^TOP
BELOW_TOP = 32752.0  # the largest float16 below 2^TOP
# Exponents of rows that fit into float32, whose magnitudes range from 2^-149 to below 2^128.
FLOAT32_EXPONENTS = range(-163, 114)


class ScaledRow(NamedTuple):
    """A row as it is stored: its values times 2^exponent."""

    values: Row
    exponent: int = 0  # other than 0 only for float16 values

    def decoded(self) -> Row:
        """Return the row: the stored values if they are unscaled, else a copy.

        The copy is in float32, or in float64 if float32 does not suffice.
        """
        if self.exponent == 0:
            return self.values
        wide = np.float32 if self.exponent in FLOAT32_EXPONENTS else np.float64
        return np.asarray(np.ldexp(self.values.astype(wide), self.exponent))


def encode_row(row: Row, precision: str) -> ScaledRow:
    """Return a copy of the row in this precision.

    Only float16 needs an exponent; the other precisions represent every float32.
    """
    if precision != "float16":
        return ScaledRow(row.astype(precision))
    exponent = exponent_for(row)
    if exponent == 0:
        return ScaledRow(row.astype(np.float16))
    wide = row if row.dtype.itemsize > 2 else row.astype(np.float32)
    values = np.ldexp(wide, -exponent).astype(np.float16)
    if exponent + TOP == 128:  # A value that is rounded up to 2^128 would not fit into float32.
        np.clip(values, -BELOW_TOP, BELOW_TOP, out=values)
    return ScaledRow(values, exponent)


def exponent_for(row: Row) -> int:
    """Return the power of two that float16 values of this row are multiplied by."""
    if not row.size:
        return 0
    largest = max(float(row.max()), -float(row.min()))
    if SMALLEST <= largest <= LARGEST or largest == 0.0 or not np.isfinite(largest):
        return 0
    return int(np.frexp(largest)[1]) - TOP
