"""What was released of a client, and the epsilon that it amounts to: by Google's `dp-accounting`.

Fleets are neighbours if one client's data are replaced by any others; clipped to C, its update moves by up to 2 C then.
Gaussian releases add up exactly; rounds of clients drawn by lot are bounded by Rényi divergences (Wang, Balle and
Kasiviswanathan 2019: sampling without replacement).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import UsageError

REPLACED = 2.0  # how far a clipped update can move, in units of the clipping norm


class Draw(NamedTuple):
    """A round's release, as far as anybody knows who does not know whom the lot chose."""

    multiplier: float  # noise over sensitivity
    drawn: int
    among: int


@dataclass(frozen=True)
class Spent:
    """On the client of whom most was released."""

    direct: float = 0.0  # sum over Gaussian releases of (sensitivity / noise)^2
    draws: Mapping[Draw, int] = field(default_factory=dict)  # and how often each

    def plus(self, direct: float = 0.0, draw: Draw | None = None) -> Spent:
        draws = self.draws if draw is None else {**self.draws, draw: self.draws.get(draw, 0) + 1}
        return Spent(self.direct + direct, draws)


def update_cost(noise_multiplier: float) -> float:
    """Of releasing one clipped update with noise of so many clipping norms.

    >>> update_cost(4.0), update_cost(0.0)
    (0.25, inf)
    """
    return _square(REPLACED / noise_multiplier) if noise_multiplier else math.inf


def report_cost(noise_multiplier: float, values: int) -> float:
    """Of releasing numbers that lie between 0 and a bound, with noise of so many bounds on each."""
    return values * _square(1.0 / noise_multiplier)


def _square(ratio: float) -> float:
    """Not by `**`, which fails where the result is too large: multipliers are what a peer says."""
    return ratio * ratio


def epsilon(spent: Spent, delta: float) -> float:
    """The better of two bounds: as if the adversary knew whom the lot chose, and, where it was drawn, as if not."""
    known = spent.direct + sum(times / draw.multiplier**2 for draw, times in spent.draws.items() if draw.multiplier)
    if any(draw.multiplier == 0.0 for draw in spent.draws):
        known = math.inf
    certain = _of_gaussian(known, delta)
    return min(certain, _of_draws(spent, delta)) if spent.draws and math.isfinite(certain) else certain


def _of_gaussian(direct: float, delta: float) -> float:
    """Exact (Balle and Wang 2018)."""
    if direct == 0.0 or not math.isfinite(direct):
        return direct
    return float(_library().get_epsilon_gaussian(1.0 / math.sqrt(direct), delta))


def _of_draws(spent: Spent, delta: float) -> float:
    library = _library()
    total = spent.direct * _orders() / 2.0
    for draw, times in spent.draws.items():
        total = total + times * _divergences(draw)
    found, _ = library.rdp.compute_epsilon(_orders(), total, delta)
    return float(found)


@cache
def _orders() -> NDArray[np.float64]:
    """Whole ones cost least; between 1 and 2 they matter where much is spent."""
    return np.array([*(1.0 + step / 10 for step in range(1, 10)), *range(2, 65), 128, 256])


@cache
def _divergences(draw: Draw) -> NDArray[np.float64]:
    """Of one such round, at every order: costly, and the same for every other."""
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
            f"privacy is accounted for with dp-accounting, which cannot be imported here ({error}). "
            "Install it with: pip install 'fairfleet[privacy]'"
        ) from error
    return dp_accounting


def check_library() -> None:
    """Found out at the start, not after the first round."""
    _library()
