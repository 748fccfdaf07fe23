"""Which codec a client is asked to use: the federation's, its own, or one that fits its measured uplink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from fairfleet.common.codecs import agree, needs

AUTO = "auto"
WHILE_UNKNOWN = "int8"
# Of falling fidelity, each with its share of the raw bytes.
LADDER = {"bf16": 0.5, "int8": 0.254, "int4": 0.141, "topsign:0.1": 0.116, "topk:0.1": 0.076, "topk:0.01": 0.0085}
TELLING_BYTES = 1 << 16  # a shorter transfer measures the delay of the link, not its breadth
NEWEST_WEIGHT = 0.5


@dataclass(frozen=True)
class CodecPolicy:
    default: str  # a codec or AUTO
    of_clients: Mapping[str, str]
    upload_seconds: float  # that AUTO lets an upload take
    raw_bytes: int  # of an update

    def choose(self, client: str, abilities: Sequence[str], uplink: float | None = None) -> str:
        """`uplink` in bytes per second, None while unknown. Refuses a client that knows no codec of ours."""
        wanted = self.of_clients.get(client, self.default)
        return agree(self._fitting(uplink, set(abilities)) if wanted == AUTO else wanted, list(abilities))

    def _fitting(self, uplink: float | None, abilities: AbstractSet[str]) -> str:
        known = {codec: share for codec, share in LADDER.items() if needs(codec) <= abilities}
        if uplink is None or not known:
            return WHILE_UNKNOWN
        most = uplink * self.upload_seconds / self.raw_bytes
        return next((codec for codec, share in known.items() if share <= most), list(known)[-1])


@dataclass
class Uplinks:
    """Bytes per second that came from each client, as its uploads show. Forgotten when the server ends."""

    _rates: dict[str, float] = field(default_factory=dict)

    def of(self, client: str) -> float | None:
        return self._rates.get(client)

    def saw(self, client: str, size_bytes: int, seconds: float) -> None:
        if size_bytes >= TELLING_BYTES and seconds > 0:
            rate = size_bytes / seconds
            before = self._rates.get(client, rate)
            self._rates[client] = before + NEWEST_WEIGHT * (rate - before)
