"""Names of clients, operators, federations, schemas and rounds: what is allowed, and the refusals.

A name is in certificates, in file names and on the command line. So it has few characters, all
of which are the same in every encoding and in every shell.
"""

from __future__ import annotations

import re

from fairfleet.common.errors import short

MAX_NAME_CHARS = 64
RESERVED_NAMES = frozenset({".", ".."})  # every folder has them: no file can have such a name
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME_CHARS}}}")
_SCHEMA = re.compile("(?!pg_|information_schema$)[a-z_][a-z0-9_]{0,62}")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]")


def is_name(text: str) -> bool:
    """Return whether a text is a name, and not a reserved one.

    >>> is_name("kitchen-camera.7"), is_name("../up"), is_name("..")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None and text not in RESERVED_NAMES


def check_name(
    text: str,
    subject: str,
    error: type[Exception] = ValueError,
    *,
    placeholder: str = "",
) -> str:
    """Return a name unchanged; raise `error` if it is not allowed.

    `subject` begins the message: it says whose name the text is. Each `placeholder` in the text,
    which becomes a number later, counts as one character.
    """
    if not is_name(text.replace(placeholder, "0") if placeholder else text):
        raise error(
            f"{subject} {short(text)!r} is not 1 to {MAX_NAME_CHARS} of a-z A-Z 0-9 . _ - "
            "(and neither . nor ..); choose another name"
        )
    return text


def check_schema_name(text: str) -> str:
    """Return a name that a PostgreSQL schema can have without quotes; raise ValueError for others.

    >>> check_schema_name("fleet_2")
    'fleet_2'
    """
    if not _SCHEMA.fullmatch(text):
        raise ValueError(
            "must be 1 to 63 of a-z 0-9 _, beginning with a letter or _, and not PostgreSQL's own "
            "(pg_…, information_schema); for example fleet_2"
        )
    return text


def replace_forbidden(text: str) -> str:
    """Return the text as a name: with "-" for other characters, and cut.

    Return "" if no name is left.

    >>> replace_forbidden("Ann's laptop")
    'Ann-s-laptop'
    """
    name = _FORBIDDEN.sub("-", text)[:MAX_NAME_CHARS]
    return "" if name in RESERVED_NAMES else name


def round_name(number: int) -> str:
    """Return how texts for people name a round. They count rounds from 1.

    The protocol, the API, JSON and metrics count from 0: their round n leads from version n to
    version n + 1. So a round has the number of the version that it made.

    >>> round_name(0)
    'round 1'
    """
    return f"round {number + 1}"
