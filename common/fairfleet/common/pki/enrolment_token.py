"""Write and read a one-time enrolment token as one line of text that can be pasted.

It contains all that a device needs: its name, the addresses, the secret, and the CA's certificate,
by which the device recognizes the server.
"""

from __future__ import annotations

import base64
import json
import ssl
from typing import NamedTuple

from fairfleet.common.errors import UsageError

PREFIX = "fft1."


class EnrolmentToken(NamedTuple):
    """A one-time token with which a device obtains its certificate."""

    client: str
    enrolment: str  # address of the Enrolment service
    server: str  # address of all others
    secret: bytes
    ca: bytes  # PEM

    def __repr__(self) -> str:
        # The secret must never appear in a log.
        return f"EnrolmentToken({self.client}, {self.enrolment})"

    def text(self) -> str:
        """Return the token as one line of ASCII text."""
        fields = json.dumps([self.client, self.enrolment, self.server])
        parts = fields.encode(), self.secret, ssl.PEM_cert_to_DER_cert(self.ca.decode())
        return PREFIX + ".".join(
            base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts
        )


def read_token(text: str) -> EnrolmentToken:
    """Return the token of a line of text. Raises UsageError if it is damaged or incomplete."""
    text = text.strip()
    try:
        if not text.startswith(PREFIX):
            raise ValueError
        coded = text.removeprefix(PREFIX).split(".")
        fields, secret, ca = (
            base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in coded
        )
        client, enrolment, server = json.loads(fields)
        if not all(isinstance(field, str) for field in (client, enrolment, server)):
            raise ValueError
        return EnrolmentToken(
            client, enrolment, server, secret, ssl.DER_cert_to_PEM_cert(ca).encode()
        )
    except (ValueError, TypeError):
        raise UsageError(
            f"this is no token of `fairfleet token`: a token begins with {PREFIX} and is one line; "
            "check that all of it was copied"
        ) from None
