"""The identity of a peer: a role and a name, as its certificate contains them.

The name alone gives no permission. The role is in the certificate too, so a client that is called
`operator` is still a client.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fairfleet.common.names import is_name

SCHEME = "fairfleet"


class Role(StrEnum):
    """The role of a peer."""

    CLIENT = "client"
    OPERATOR = "operator"
    NOBODY = "nobody"  # a peer without a certificate, or with one that contains no role


class Identity(NamedTuple):
    """The role and the name of a peer."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}".rstrip()

    @property
    def uri(self) -> str:
        """Return the form of a certificate's subject alternative name."""
        return f"{SCHEME}://{self.role}/{self.name}"


NOBODY = Identity(Role.NOBODY, "")


def identity_of(uris: list[str]) -> Identity:
    """Return the identity in a certificate's URIs, or NOBODY unless exactly one is ours.

    >>> identity_of(["fairfleet://client/kitchen"])
    Identity(role=<Role.CLIENT: 'client'>, name='kitchen')
    >>> identity_of(["fairfleet://client/a", "fairfleet://client/b"]) == NOBODY
    True
    >>> identity_of(["fairfleet://nobody/x"]) == NOBODY
    True
    """
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}://")]
    if len(ours) != 1:
        return NOBODY
    role, _, name = ours[0].removeprefix(f"{SCHEME}://").partition("/")
    if role not in (Role.CLIENT, Role.OPERATOR) or not is_name(name):
        return NOBODY
    return Identity(Role(role), name)
