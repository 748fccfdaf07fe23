"""Who speaks: a role and a name, as a certificate says them.

The name alone gives no right: the role is in the certificate too, so a client that is called `operator` is a client.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SCHEME = "fairfleet"


class Role(StrEnum):
    CLIENT = "client"
    OPERATOR = "operator"
    NOBODY = "nobody"  # whoever shows no certificate, or one that says nothing of a role


class Identity(NamedTuple):
    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}".rstrip()

    @property
    def uri(self) -> str:
        """As it stands among a certificate's subject alternative names."""
        return f"{SCHEME}://{self.role}/{self.name}"


NOBODY = Identity(Role.NOBODY, "")


def is_name(text: str) -> bool:
    """Whether a client can be called so: the name is also that of files.

    >>> is_name("kitchen-camera.7"), is_name("../up"), is_name("..")
    (True, False, False)
    """
    return NAME.fullmatch(text) is not None and text not in (".", "..")


def identity_of(uris: list[str]) -> Identity:
    """What a certificate's URIs say: exactly one of ours, or it is nobody's.

    >>> identity_of(["fairfleet://client/kitchen"])
    Identity(role=<Role.CLIENT: 'client'>, name='kitchen')
    >>> identity_of(["fairfleet://client/a", "fairfleet://client/b"]) == identity_of(["fairfleet://nobody/x"]) == NOBODY
    True
    """
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}://")]
    if len(ours) != 1:
        return NOBODY
    role, _, name = ours[0].removeprefix(f"{SCHEME}://").partition("/")
    if role not in (Role.CLIENT, Role.OPERATOR) or not is_name(name):
        return NOBODY
    return Identity(Role(role), name)
