"""Text as arrays of characters: one byte each, in a fixed order that does not depend on the data."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from fairfleet.lab.datasets.base import Array

LAST_CHARACTER = sys.maxunicode
WINDOW = 80  # characters that a sample shows; its label is the one that follows


class Alphabet:
    """Codes from 0 for the characters given; any other counts as a blank."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.size = len(characters)
        self.blank = characters.index(" ")
        self._codes = np.full(LAST_CHARACTER + 1, self.blank, np.uint8)
        self._codes[[ord(character) for character in characters]] = np.arange(self.size)

    def encode(self, text: str) -> Array:
        points = np.frombuffer(text.encode("utf-32-le", "replace"), "<u4")
        return np.asarray(self._codes[points])


def windows(codes: Array, stride: int = 1, length: int = WINDOW) -> tuple[Array, Array]:
    """Every so many characters, and the one after each."""
    if len(codes) <= length:
        return np.empty((0, length), np.uint8), np.empty(0, np.int64)
    views = np.lib.stride_tricks.sliding_window_view(codes[:-1], length)[::stride]
    return views, codes[length::stride].astype(np.int64)


def padded(codes: Sequence[Array], length: int, padding: int) -> Array:
    """One row for each text: its last characters at the end, so that a recurrent model sees them last."""
    rows = np.full((len(codes), length), padding, np.uint8)
    for row, own in zip(rows, codes, strict=True):
        if kept := min(len(own), length):
            row[-kept:] = own[-kept:]
    return rows
