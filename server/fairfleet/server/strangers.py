"""How many wrong tokens strangers may show, by address and in all. Whoever has a right one is none, and never waits.

A token cannot be guessed; but each wrong one costs a line in the log, and whoever reaches the port could send them
without end. An honest device behind the same router as such a peer is not refused for its neighbour's sake.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

from fairfleet.server.limits import Buckets

MOST_ADDRESSES = 10_000  # remembered; whoever has more than that meets the limit for all
IPV6_NETWORK = 64  # bits: what one household or machine is given


class Strangers:
    def __init__(self, per_minute: int, in_all: int) -> None:
        self._each = Buckets(per_minute, MOST_ADDRESSES, "enrolments", "sent wrong tokens", kind="")
        self._all = Buckets(in_all, 1, "enrolments", "sent wrong tokens", kind="")

    def sent_wrong_token(self, peer: str, now: float) -> None:
        """Raises LimitReached if there were too many of late."""
        self._each.take(address_of(peer), now)
        self._all.take("strangers from everywhere", now)


def address_of(peer: str) -> str:
    """By which a peer, as gRPC names it, is counted.

    >>> address_of("ipv4:192.0.2.7:51234"), address_of("ipv6:%5B2001:db8:1:2::7%5D:443"), address_of("unix:")
    ('192.0.2.7', '2001:db8:1:2::/64', 'unix')
    """
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind[:16]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))
