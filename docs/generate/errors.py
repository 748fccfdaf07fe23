"""The page of exit codes and errors, from the tree of error classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from docs.generate.markdown import GENERATED, table
from fairfleet.common.errors import FleetError

EXIT_CODES = (
    (
        "0",
        "The command did what it was asked to do. A server or client that has begun its work also "
        "ends with 0 on SIGTERM.",
    ),
    ("1", "A failure of the task, of the server at a call, or of FairFleet itself."),
    (
        "2",
        "A mistake in flags, settings, files or ports, which the message names; also a client "
        "without credentials at a server with TLS, and an expired certificate.",
    ),
    ("3", "The state directory or the database cannot be used. Nothing was changed."),
    ("4", "The peer refused a request."),
    ("5", "Another process acts for this client."),
    (
        "6",
        "No server answers at the address, or the server does not use TLS and the client has "
        "credentials.",
    ),
    ("130", "Ended by Ctrl-C."),
    ("143", "Ended by SIGTERM, by a command that has nothing to finish."),
)


def errors_page() -> str:
    """Return the Markdown page of exit codes and errors."""
    lines = [
        GENERATED,
        "# Exit codes and errors",
        "",
        "A message says what was found, what was expected and what to do. The name of the error is",
        "in JSON logs, and in the trailing metadata `fairfleet-error` of a refused call.",
        "",
        "## Exit codes",
        "",
        *table(("code", "meaning"), EXIT_CODES),
        "",
        "## Errors",
        "",
    ]
    for kind in _tree(FleetError):
        lines += _entry(kind)
    return "\n".join(lines)


def _tree(kind: type[FleetError]) -> Iterator[type[FleetError]]:
    for child in kind.__subclasses__():
        if child.__module__ == FleetError.__module__:
            yield child
            yield from _tree(child)


def _entry(kind: type[FleetError]) -> list[str]:
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    base = kind.__bases__[0]
    facts = [f"gRPC status {kind.status.name}", f"exit code {kind.exit_code}"]
    if base is not FleetError:
        facts.append(f"a kind of [{base.__name__}](#{base.__name__.lower()})")
    texts = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return [f"### {kind.__name__}", "", f"*{', '.join(facts)}*", "", *_spaced(texts)]


def _spaced(paragraphs: list[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield from (paragraph, "")
