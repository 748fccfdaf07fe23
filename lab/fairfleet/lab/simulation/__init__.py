"""Federations simulated in one process, with the server's and the client's own code.

`Federation` and `Simulation` load torch, so they are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fairfleet.lab.simulation.behaviour import (
    Attack,
    Behaviour,
    FleetBehaviour,
    LateJoiners,
    Stragglers,
)

if TYPE_CHECKING:
    from fairfleet.lab.simulation.federation import Federation
    from fairfleet.lab.simulation.simulation import Simulation

__all__ = [
    "Attack",
    "Behaviour",
    "Federation",
    "FleetBehaviour",
    "LateJoiners",
    "Simulation",
    "Stragglers",
]

_MODULES = {"Federation": "federation", "Simulation": "simulation"}


def __getattr__(name: str) -> Any:
    """Import a public name that loads torch on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
