"""The codec for each client: the federation's, its own, or one that fits its measured uplink.

`auto` selects the most precise codec with which an upload should take no longer than allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from fairfleet.common.codecs import agree, needs

AUTO = "auto"
WHILE_UNKNOWN = "int8"
# Codecs by decreasing precision, each with its share of the raw bytes.
LADDER = {
    "bf16": 0.5,
    "int8": 0.254,
    "int4": 0.141,
    "topsign:0.1": 0.116,
    "topk:0.1": 0.076,
    "topk:0.01": 0.0085,
}
TELLING_BYTES = 1 << 16  # a shorter transfer measures latency, not bandwidth
NEWEST_WEIGHT = 0.5


@dataclass(frozen=True)
class CodecPolicy:
    """The settings that determine a client's codec."""

    default: str  # a codec or AUTO
    of_clients: Mapping[str, str]
    upload_seconds: float  # the longest upload that AUTO accepts
    raw_bytes: int  # of an update

    def choose(self, client: str, abilities: Sequence[str], uplink: float | None = None) -> str:
        """Return the codec for a client; raise WrongState if no codec is supported by both sides.

        `uplink` is in bytes per second; None while it is unknown.
        """
        setting = self.of_clients.get(client, self.default)
        return agree(
            self._fitting(uplink, set(abilities)) if setting == AUTO else setting, list(abilities)
        )

    def choices(self, client: str, abilities: Sequence[str]) -> frozenset[str]:
        """Return every codec that `choose` may return for this client, whatever its uplink is."""
        if self.of_clients.get(client, self.default) != AUTO:
            return frozenset({self.choose(client, abilities)})
        supported = {codec for codec in LADDER if needs(codec) <= set(abilities)}
        return frozenset({*supported, self.choose(client, abilities)})

    def _fitting(self, uplink: float | None, abilities: AbstractSet[str]) -> str:
        supported = {codec: share for codec, share in LADDER.items() if needs(codec) <= abilities}
        if uplink is None or not supported:
            return WHILE_UNKNOWN
        affordable = uplink * self.upload_seconds / self.raw_bytes
        fitting = (codec for codec, share in supported.items() if share <= affordable)
        return next(fitting, list(supported)[-1])


@dataclass
class Uplinks:
    """Measured upload rates in bytes per second, by client. A restart forgets them."""

    _rates: dict[str, float] = field(default_factory=dict)

    def of(self, client: str) -> float | None:
        """Return the rate of a client; None while it is unknown."""
        return self._rates.get(client)

    def saw(self, client: str, size_bytes: int, seconds: float) -> None:
        """Update the rate of a client by one transfer; short transfers do not count."""
        if size_bytes >= TELLING_BYTES and seconds > 0:
            rate = size_bytes / seconds
            before = self._rates.get(client, rate)
            self._rates[client] = before + NEWEST_WEIGHT * (rate - before)
