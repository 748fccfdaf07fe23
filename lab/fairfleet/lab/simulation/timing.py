"""The time that the parts of simulated rounds take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass
class Seconds:
    """The time spent on each part of the rounds."""

    training: float = 0.0
    aggregation: float = 0.0
    evaluation: float = 0.0

    @contextmanager
    def timed(self, part: Literal["training", "aggregation", "evaluation"]) -> Iterator[None]:
        """Add the time that the body takes to this part, unless the body fails."""
        began = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - began)
