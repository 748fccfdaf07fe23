"""A one-time token as a line of text: whose it is, where to take it, the secret, and the CA by which the device knows
the server. Everything that a device needs, in something that can be pasted.
"""

from __future__ import annotations

import base64
import json
import ssl
from typing import NamedTuple

from fairfleet.common.errors import UsageError

PREFIX = "fft1."


class EnrolmentToken(NamedTuple):
    client: str
    enrolment: str  # address of the Enrolment service
    server: str  # address of all others
    secret: bytes
    ca: bytes  # PEM

    def __repr__(self) -> str:
        return f"EnrolmentToken({self.client}, {self.enrolment})"  # never the secret

    def text(self) -> str:
        told = [self.client, self.enrolment, self.server]
        parts = json.dumps(told).encode(), self.secret, ssl.PEM_cert_to_DER_cert(self.ca.decode())
        return PREFIX + ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def read_token(text: str) -> EnrolmentToken:
    text = text.strip()
    try:
        if not text.startswith(PREFIX):
            raise ValueError
        coded = text.removeprefix(PREFIX).split(".")
        told, secret, ca = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in coded)
        client, enrolment, server = json.loads(told)
        if not all(isinstance(field, str) for field in (client, enrolment, server)):
            raise ValueError
        return EnrolmentToken(client, enrolment, server, secret, ssl.DER_cert_to_PEM_cert(ca).encode())
    except (ValueError, TypeError):
        raise UsageError(
            f"this is no token of `fairfleet token`: it begins with {PREFIX} and is one line; was all of it copied?"
        ) from None
