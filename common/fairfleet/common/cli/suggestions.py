"""What to do about a mistake in the settings: a similar name, or how to give a missing value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

CUTOFF = 0.6  # how similar two names must be, from 0 to 1


def did_you_mean(kind: type[BaseModel], path: Sequence[int | str]) -> str:
    """Return `; did you mean …?` for the path of an unknown setting; empty if none is similar.

    A setting of the same section comes first, then one of the whole program: `http_port` and
    `port` are both `http.port`.
    """
    *parents, name = map(str, path)
    known = dict(_settings(kind))
    prefix = "".join(f"{parent}." for parent in parents)
    siblings = {known_path.removeprefix(prefix): known_path for known_path in known}
    siblings = {key: value for key, value in siblings.items() if "." not in key}
    anywhere = {known_path.replace(".", "_"): known_path for known_path in known}
    last_parts = {path.rpartition(".")[2]: path for path in reversed(known)}  # the first wins
    whole = "_".join((*parents, name))
    if exact := anywhere.get(whole) or last_parts.get(name):
        return f"; did you mean {exact!r}?"
    for wanted, names in ((name, siblings), (whole, anywhere), (name, last_parts)):
        for match in get_close_matches(wanted, names, 1, CUTOFF):
            return f"; did you mean {names[match]!r}?"
    return ""


def how_to_give(kind: type[BaseModel], path: Sequence[int | str]) -> str:
    """Return how to give a missing setting: its description, and the flag of its example."""
    field = kind.model_fields.get(str(path[0])) if len(path) == 1 else None
    if field is None:
        return ""
    text = f" ({field.description})" if field.description else ""
    for example in field.examples or ():
        text += f". Give it with, for example, {example}"
    return text


def _settings(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of every setting and section."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", field
        for section in _sections(field.annotation):
            yield from _settings(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
