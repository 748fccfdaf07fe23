"""Text as arrays of character codes, one byte each.

The order of the codes is fixed and does not depend on the data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from fairfleet.lab.datasets.base import Array

LAST_CHARACTER = sys.maxunicode
WINDOW = 80  # Characters of a sample; its label is the next character.


class Alphabet:
    """Codes from 0 for the given characters; any other character counts as a blank."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.size = len(characters)
        self.blank = characters.index(" ")
        self._codes = np.full(LAST_CHARACTER + 1, self.blank, np.uint8)
        self._codes[[ord(character) for character in characters]] = np.arange(self.size)

    def encode(self, text: str) -> Array:
        """Return the code of each character as uint8."""
        points = np.frombuffer(text.encode("utf-32-le", "replace"), "<u4")
        return np.asarray(self._codes[points])


def windows(codes: Array, stride: int = 1, length: int = WINDOW) -> tuple[Array, Array]:
    """Return a sample of `length` codes every `stride` characters, and the code after each.

    The samples have shape (n, length); n is 0 if the text is too short.
    """
    if len(codes) <= length:
        return np.empty((0, length), np.uint8), np.empty(0, np.int64)
    views = np.lib.stride_tricks.sliding_window_view(codes[:-1], length)[::stride]
    return views, codes[length::stride].astype(np.int64)


def padded(codes: Sequence[Array], length: int, padding: int) -> Array:
    """Return one row of `length` codes for each text, filled up with `padding` at the start.

    The last characters of a text are at the end of its row, so that a recurrent model sees them
    last; a longer text loses its first characters.
    """
    rows = np.full((len(codes), length), padding, np.uint8)
    for row, text in zip(rows, codes, strict=True):
        if used := min(len(text), length):
            row[-used:] = text[-used:]
    return rows
