"""The server's privacy accountant: computes epsilon from what was released.

`common.privacy_costs` counts Gaussian releases. Rounds of randomly selected clients are bounded by
Rényi divergences (Wang, Balle and Kasiviswanathan 2019: sampling without replacement), which
Google's `dp-accounting` computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import UsageError
from fairfleet.common.extras import install_command
from fairfleet.common.privacy_costs import gaussian_epsilon


class SampledRelease(NamedTuple):
    """A round's release, as seen by an adversary that does not know the selected clients."""

    multiplier: float  # noise over sensitivity
    drawn: int
    among: int


@dataclass(frozen=True)
class PrivacySpent:
    """What was released of the client with the largest total."""

    direct: float = 0.0  # sum over Gaussian releases of (sensitivity / noise)^2
    draws: Mapping[SampledRelease, int] = field(default_factory=dict)  # with their counts

    def plus(self, direct: float = 0.0, draw: SampledRelease | None = None) -> PrivacySpent:
        """Return the total after another release of a known or of a randomly selected client."""
        draws = self.draws if draw is None else {**self.draws, draw: self.draws.get(draw, 0) + 1}
        return PrivacySpent(self.direct + direct, draws)


def epsilon(spent: PrivacySpent, delta: float) -> float:
    """Return the smaller of two bounds on epsilon.

    The first assumes that the adversary knows the selected clients. The second, for rounds of
    randomly selected clients, assumes that it does not.
    """
    direct = spent.direct + sum(
        times / draw.multiplier**2 for draw, times in spent.draws.items() if draw.multiplier
    )
    if any(draw.multiplier == 0.0 for draw in spent.draws):
        direct = math.inf
    certain = gaussian_epsilon(direct, delta)
    return (
        min(certain, _of_draws(spent, delta)) if spent.draws and math.isfinite(certain) else certain
    )


def _of_draws(spent: PrivacySpent, delta: float) -> float:
    library = _library()
    total = spent.direct * _orders() / 2.0
    for draw, times in spent.draws.items():
        total = total + times * _divergences(draw)
    bound, _ = library.rdp.compute_epsilon(_orders(), total, delta)
    return float(bound)


@cache
def _orders() -> NDArray[np.float64]:
    """Return the Rényi orders. Integers are cheapest; those in (1, 2) matter at large epsilon."""
    return np.array([*(1.0 + step / 10 for step in range(1, 10)), *range(2, 65), 128, 256])


# The results of `_divergences`, in this or an earlier run of the server.
_cached: dict[SampledRelease, NDArray[np.float64]] = {}


def is_known(draw: SampledRelease) -> bool:
    """Return whether the divergences are cached; computing them takes a good part of a second."""
    return draw in _cached


def method() -> str:
    """Name what the divergences depend on besides the draw: those of another method are useless."""
    return f"dp-accounting {version('dp-accounting')}, {len(_orders())} orders"


def remember(draw: SampledRelease, divergences: Sequence[float]) -> None:
    """Cache what `divergences_of` returned, perhaps in an earlier run of the server."""
    _cached[draw] = np.array(divergences)


def divergences_of(draw: SampledRelease) -> list[float]:
    """Return a round's Rényi divergences. Slow if not cached: do not call on the event loop."""
    return [float(value) for value in _divergences(draw)]


def _divergences(draw: SampledRelease) -> NDArray[np.float64]:
    """Return the divergences of one such round at every order. They are costly, so cached."""
    if draw not in _cached:
        _cached[draw] = _compute(draw)
    return _cached[draw]


def _compute(draw: SampledRelease) -> NDArray[np.float64]:
    library = _library()
    accountant = library.rdp.RdpAccountant(_orders(), library.NeighboringRelation.REPLACE_ONE)
    gaussian = library.GaussianDpEvent(draw.multiplier)
    accountant.compose(library.SampledWithoutReplacementDpEvent(draw.among, draw.drawn, gaussian))
    return np.array(accountant.rdp)


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise UsageError(
            f"privacy accounting needs dp-accounting, which cannot be imported ({error}). "
            f"Run {install_command('privacy')}"
        ) from error
    return dp_accounting


def check_library() -> None:
    """Raise UsageError at the start, not after the first round, if the library is missing."""
    _library()
