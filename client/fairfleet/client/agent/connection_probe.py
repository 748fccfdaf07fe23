"""A probe that finds out why no connection to a server is established.

One side may use TLS and the other not, or a certificate may be wrong. gRPC reports UNAVAILABLE for
all of these, as for a server that is down. The probe opens its own connection, sends the first
message of a TLS handshake, and examines the answer. It sends nothing else. If it learns nothing it
returns nothing: a server that is down, starting or out of reach gets no diagnosis.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from enum import Enum
from typing import NamedTuple

from fairfleet.common.errors import FleetError, Unreachable, UsageError
from fairfleet.common.net.addresses import host_of
from fairfleet.common.net.server_access import ServerAccess

PROBE_SECONDS = 3.0  # for each step; a slower connection gets no diagnosis
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # used by gRPC, but not by the probe
TLS_RECORDS = (0x15, 0x16)  # an alert, or a handshake
HTTP2_SETTINGS = 0x04  # the type of the first frame of an HTTP/2 server without TLS
UNKNOWN_ISSUER = (18, 19, 20, 21)  # OpenSSL's verification codes
OTHER_NAME = (62, 64)
NOT_VALID_NOW = (9, 10)


class Problem(Enum):
    """What keeps a client from connecting, with the words for its owner."""

    SERVER_WANTS_TLS = (
        "the server there uses TLS, and no credentials were given: give --credentials NAME.fleet"
    )
    SERVER_IN_CLEAR = (
        "the server there does not use TLS: start it with --pki, or leave out --credentials here"
    )
    UNKNOWN_CA = (
        "the server's certificate is not of the CA in --credentials: give the file that this "
        "federation's operator made"
    )
    OTHER_HOST = (
        "the server's certificate is for another host name: give --server with a name that it is "
        "for, or make one for this name with `fairfleet pki renew NAME`"
    )
    NOT_VALID_NOW = (
        "the server's certificate is not valid at this time: renew it, or set this machine's clock"
    )


class ProbeResult(NamedTuple):
    """A problem, and whether only different flags on one side can solve it."""

    problem: Problem
    is_lasting: bool

    def to_error(self, address: str) -> FleetError:
        """Return the error to end the client with; missing credentials are a usage error."""
        message = f"server {address}: {self.problem.value}"
        if self.problem is Problem.SERVER_WANTS_TLS:
            return UsageError(message)
        return Unreachable(message)


def probe(access: ServerAccess) -> ProbeResult | None:
    """Return what keeps this client from the server, or None if nothing is known."""
    host, port = host_of(access.address), access.address.rpartition(":")[2]
    is_unix_socket = access.address.startswith("unix")
    if not host or not port.isdigit() or is_unix_socket or _is_behind_proxy(host):
        return None
    try:
        return _diagnose(host, int(port), access)
    except ssl.SSLCertVerificationError as error:
        problem = certificate_problem(error.verify_code)
        # This may pass, because the server may get another certificate.
        return ProbeResult(problem, is_lasting=False) if problem else None
    except (OSError, ValueError):  # ValueError: the host name is malformed
        return None


def _diagnose(host: str, port: int, access: ServerAccess) -> ProbeResult | None:
    answer = _first_answer(host, port)
    problem = mismatch(answer, access.credentials is not None)
    if problem is not None:
        return ProbeResult(problem, is_lasting=True)
    if access.credentials is not None and speaks_tls(answer):
        _verify_certificate(host, port, access.credentials.ca)
    return None


def speaks_tls(answer: bytes) -> bool:
    """Return whether a TLS server answers the first message of a handshake like this.

    >>> speaks_tls(bytes.fromhex("160303007a02")), speaks_tls(bytes.fromhex("0000180400"))
    (True, False)
    >>> speaks_tls(b"")
    False
    """
    return len(answer) >= 2 and answer[0] in TLS_RECORDS and answer[1] == 0x03


def speaks_clear(answer: bytes) -> bool:
    """Return whether a server without TLS answers like this: HTTP/2 settings or an HTTP/1 error.

    >>> speaks_clear(bytes.fromhex("000018040000000000")), speaks_clear(b"HTTP/1.1 400 Bad")
    (True, True)
    >>> speaks_clear(b"")
    False
    """
    return answer[3:4] == bytes([HTTP2_SETTINGS]) or answer.startswith(b"HTTP/1")


def mismatch(answer: bytes, encrypted: bool) -> Problem | None:
    """Return the problem if the server's answer shows that only one side uses TLS."""
    if not encrypted and speaks_tls(answer):
        return Problem.SERVER_WANTS_TLS
    if encrypted and not speaks_tls(answer) and speaks_clear(answer):
        return Problem.SERVER_IN_CLEAR
    return None


def certificate_problem(verify_code: int) -> Problem | None:
    """Return what OpenSSL's code of a failed verification means, or None for other codes.

    >>> certificate_problem(62).name, certificate_problem(20).name, certificate_problem(1)
    ('OTHER_HOST', 'UNKNOWN_CA', None)
    """
    codes_by_problem = {
        Problem.UNKNOWN_CA: UNKNOWN_ISSUER,
        Problem.OTHER_HOST: OTHER_NAME,
        Problem.NOT_VALID_NOW: NOT_VALID_NOW,
    }
    return next((p for p, codes in codes_by_problem.items() if verify_code in codes), None)


def _is_behind_proxy(host: str) -> bool:
    if not any(os.environ.get(name) for name in PROXIES):
        return False
    from urllib.request import proxy_bypass  # slow to import and rarely needed

    return not proxy_bypass(host)


def _first_answer(host: str, port: int) -> bytes:
    """Send the first message of a TLS handshake and return the first bytes of the answer.

    The answer is empty if the server closes the connection.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):  # after it has written its first message
        context.wrap_bio(incoming, outgoing).do_handshake()
    with socket.create_connection((host, port), PROBE_SECONDS) as connection:
        connection.sendall(outgoing.read())
        return connection.recv(64)


def _verify_certificate(host: str, port: int, ca: bytes) -> None:
    """Check the server's certificate as gRPC does; raise SSLCertVerificationError if it is wrong.

    This client's own certificate is not sent: a server that does not accept it only closes the
    connection, which reveals nothing.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=ca.decode())
    with (
        socket.create_connection((host, port), PROBE_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        pass
